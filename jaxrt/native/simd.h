// Vectors of one instruction set. Included once per set, inside a namespace of its own and with that set switched on:
// JAXRT_AVX512 and JAXRT_AVX2 (x86-64), JAXRT_NEON (aarch64), or none of them (plain C++, for any processor).
//
// Floats: a vector of LANES float32. Quants: 32 weights as int16. Pairs of int16 are multiplied into int32, which
// cannot overflow: |weight| <= 128, |activation| <= 32767, eight products a lane.

#if JAXRT_AVX512
using Floats = __m512;
constexpr int LANES = 16;
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const uint16_t* p) {  // bfloat16
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Floats load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats all(float a) { return _mm512_set1_ps(a); }
inline void store(Floats a, float* p) { _mm512_storeu_ps(p, a); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
#elif JAXRT_AVX2
using Floats = __m256;
constexpr int LANES = 8;
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const uint16_t* p) {  // bfloat16
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Floats all(float a) { return _mm256_set1_ps(a); }
inline void store(Floats a, float* p) { _mm256_storeu_ps(p, a); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#elif JAXRT_NEON
struct Floats {
  float32x4_t a, b;
};
constexpr int LANES = 8;
inline Floats zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Floats load(const uint16_t* p) {  // bfloat16
  uint16x8_t bits = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16))};
}
inline Floats load(const int8_t* p) {
  int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
inline Floats all(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
inline void store(Floats a, float* p) {
  vst1q_f32(p, a.a);
  vst1q_f32(p + 4, a.b);
}
inline Floats larger(Floats a, Floats b) { return {vmaxq_f32(a.a, b.a), vmaxq_f32(a.b, b.b)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
inline float sum(Floats a) { return vaddvq_f32(vaddq_f32(a.a, a.b)); }
#else
struct Floats {
  float at[8];
};
constexpr int LANES = 8;
inline Floats zero() { return {}; }
inline Floats load(const float* p) {
  Floats out;
  std::memcpy(out.at, p, sizeof out.at);
  return out;
}
inline Floats load(const uint16_t* p) {  // bfloat16
  Floats out;
  for (int i = 0; i < 8; ++i) out.at[i] = bfloat16(p[i]);
  return out;
}
inline Floats load(const int8_t* p) {
  Floats out;
  for (int i = 0; i < 8; ++i) out.at[i] = p[i];
  return out;
}
inline Floats all(float a) { return {{a, a, a, a, a, a, a, a}}; }
inline void store(Floats a, float* p) { std::memcpy(p, a.at, sizeof a.at); }
inline Floats larger(Floats a, Floats b) {
  for (int i = 0; i < 8; ++i) a.at[i] = std::max(a.at[i], b.at[i]);
  return a;
}
inline Floats fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 8; ++i) c.at[i] += a.at[i] * b.at[i];
  return c;
}
inline float sum(Floats a) {
  float total = 0;
  for (float each : a.at) total += each;
  return total;
}
#endif

#if JAXRT_AVX2 || JAXRT_AVX512
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {  // 8 x 8
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
using Pair = __m128;  // of which two lanes count
inline Pair pair(float a, float b) { return _mm_setr_ps(a, b, 0, 0); }
inline Pair load_pair(const float* p) { return _mm_castpd_ps(_mm_load_sd((const double*)p)); }
inline Pair halves(const uint8_t* p) {  // two binary16
  int32_t both;
  std::memcpy(&both, p, 4);
  return _mm_cvtph_ps(_mm_cvtsi32_si128(both));
}
inline Pair times(Pair a, Pair b) { return _mm_mul_ps(a, b); }
inline Pair plus(Pair a, Pair b) { return _mm_add_ps(a, b); }
inline float first(Pair a) { return _mm_cvtss_f32(a); }
inline float second(Pair a) { return _mm_cvtss_f32(_mm_movehdup_ps(a)); }
#else
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {  // 8 x 8
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * from_stride + j];
}
#endif

#if JAXRT_AVX512
using Lanes = Floats;  // of sums of products of Quants
inline Lanes no_lanes() { return zero(); }
using Quants = __m512i;
using Bytes = __m256i;
inline Bytes thirty_two(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
template <int SHIFT>
inline Bytes bits(Bytes b, int mask) {  // (b >> SHIFT) & mask, byte by byte
  return _mm256_and_si256(_mm256_srli_epi16(b, SHIFT), _mm256_set1_epi8((char)mask));
}
template <int SHIFT>
inline Bytes put(Bytes b, Bytes more) {  // b | more << SHIFT, which must not leave its byte
  return _mm256_or_si256(b, _mm256_slli_epi16(more, SHIFT));
}
inline Bytes nibbles(const uint8_t* p) {  // 16 low halves, then 16 high ones
  __m128i both = _mm_loadu_si128((const __m128i*)p);
  return bits<0>(_mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1), 15);
}
inline Bytes spread(uint32_t word) { return _mm256_maskz_set1_epi8(word, 1); }  // bit i of the word as byte i, 0 or 1
inline Quants widen(Bytes b, int offset) {  // unsigned bytes less an offset
  return _mm512_sub_epi16(_mm512_cvtepu8_epi16(b), _mm512_set1_epi16((short)offset));
}
inline Quants widen_signed(Bytes b) { return _mm512_cvtepi8_epi16(b); }
inline Quants load_quants(const int16_t* p) { return _mm512_loadu_si512(p); }
inline void store(const Quants& q, int16_t* p) { _mm512_storeu_si512(p, q); }
inline Lanes add_products(Lanes acc, const Quants& w, const Quants& x, Floats scales) {
  return fma(_mm512_cvtepi32_ps(_mm512_dpwssd_epi32(_mm512_setzero_si512(), w, x)), scales, acc);
}
inline Lanes dot(Lanes acc, const Quants& w, const Quants& x, Pair scale) {  // by the pair's first
  return add_products(acc, w, x, _mm512_broadcastss_ps(scale));
}
inline Lanes dot_halves(Lanes acc, const Quants& w, const Quants& x, Pair scales) {  // the two halves by the pair's two
  return add_products(acc, w, x, _mm512_mask_broadcastss_ps(_mm512_broadcastss_ps(scales), 0xff00, _mm_movehdup_ps(scales)));
}
#elif JAXRT_AVX2
inline float sum(__m256 a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
using Lanes = __m256;  // of sums of products of Quants
inline Lanes no_lanes() { return _mm256_setzero_ps(); }
struct Quants {
  __m256i low, high;  // 16 int16 each
};
struct Bytes {
  __m128i low, high;  // 16 bytes each
};
inline __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Bytes thirty_two(const uint8_t* p) { return {sixteen(p), sixteen(p + 16)}; }
template <int SHIFT>
inline Bytes bits(Bytes b, int mask) {  // (b >> SHIFT) & mask, byte by byte
  __m128i m = _mm_set1_epi8((char)mask);
  return {_mm_and_si128(_mm_srli_epi16(b.low, SHIFT), m), _mm_and_si128(_mm_srli_epi16(b.high, SHIFT), m)};
}
template <int SHIFT>
inline Bytes put(Bytes b, Bytes more) {  // b | more << SHIFT, which must not leave its byte
  return {_mm_or_si128(b.low, _mm_slli_epi16(more.low, SHIFT)), _mm_or_si128(b.high, _mm_slli_epi16(more.high, SHIFT))};
}
inline Bytes nibbles(const uint8_t* p) {  // 16 low halves, then 16 high ones
  __m128i both = sixteen(p), m = _mm_set1_epi8(15);
  return {_mm_and_si128(both, m), _mm_and_si128(_mm_srli_epi16(both, 4), m)};
}
inline Bytes spread(uint32_t word) {  // bit i of the word as byte i, 0 or 1
  const __m128i pick = _mm_set_epi64x(0x8040201008040201ll, 0x8040201008040201ll);
  const __m128i first = _mm_set_epi64x(0x0101010101010101ll, 0), last = _mm_set_epi64x(0x0303030303030303ll, 0x0202020202020202ll);
  const __m128i all = _mm_set1_epi32((int)word), one = _mm_set1_epi8(1);
  __m128i low = _mm_and_si128(_mm_shuffle_epi8(all, first), pick), high = _mm_and_si128(_mm_shuffle_epi8(all, last), pick);
  return {_mm_and_si128(_mm_cmpeq_epi8(low, pick), one), _mm_and_si128(_mm_cmpeq_epi8(high, pick), one)};
}
inline Quants widen(Bytes b, int offset) {  // unsigned bytes less an offset
  __m256i o = _mm256_set1_epi16((short)offset);
  Quants q = {_mm256_cvtepu8_epi16(b.low), _mm256_cvtepu8_epi16(b.high)};
  if (offset) q = {_mm256_sub_epi16(q.low, o), _mm256_sub_epi16(q.high, o)};
  return q;
}
inline Quants widen_signed(Bytes b) { return {_mm256_cvtepi8_epi16(b.low), _mm256_cvtepi8_epi16(b.high)}; }
inline Quants load_quants(const int16_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
inline void store(const Quants& q, int16_t* p) {
  _mm256_storeu_si256((__m256i*)p, q.low);
  _mm256_storeu_si256((__m256i*)(p + 16), q.high);
}
inline Lanes add_scaled(Lanes acc, __m256i products, __m128 scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_broadcastss_ps(scale), acc);
}
inline Lanes dot(Lanes acc, const Quants& w, const Quants& x, Pair scale) {  // by the pair's first
  __m256i products = _mm256_add_epi32(_mm256_madd_epi16(w.low, x.low), _mm256_madd_epi16(w.high, x.high));
  return add_scaled(acc, products, scale);
}
inline Lanes dot_halves(Lanes acc, const Quants& w, const Quants& x, Pair scales) {  // the two halves by the pair's two
  acc = add_scaled(acc, _mm256_madd_epi16(w.low, x.low), scales);
  return add_scaled(acc, _mm256_madd_epi16(w.high, x.high), _mm_movehdup_ps(scales));
}
#else
using Lanes = Floats;
inline Lanes no_lanes() { return zero(); }
#endif

#if JAXRT_NEON
struct Quants {
  int16x8_t at[4];
};
struct Bytes {
  uint8x16_t low, high;
};
inline Bytes thirty_two(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
template <int SHIFT>
inline Bytes bits(Bytes b, int mask) {
  uint8x16_t m = vdupq_n_u8((uint8_t)mask);
  if constexpr (SHIFT) b = {vshrq_n_u8(b.low, SHIFT ? SHIFT : 1), vshrq_n_u8(b.high, SHIFT ? SHIFT : 1)};
  return {vandq_u8(b.low, m), vandq_u8(b.high, m)};
}
template <int SHIFT>
inline Bytes put(Bytes b, Bytes more) {
  return {vorrq_u8(b.low, vshlq_n_u8(more.low, SHIFT)), vorrq_u8(b.high, vshlq_n_u8(more.high, SHIFT))};
}
inline Bytes nibbles(const uint8_t* p) {
  uint8x16_t both = vld1q_u8(p);
  return {vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
}
inline Bytes spread(uint32_t word) {
  uint8_t out[32];
  for (int i = 0; i < 32; ++i) out[i] = word >> i & 1;
  return thirty_two(out);
}
inline int16x8_t less(uint8x8_t b, int offset) {
  return vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(b)), vdupq_n_s16((int16_t)offset));
}
inline Quants widen(Bytes b, int offset) {
  return {{less(vget_low_u8(b.low), offset), less(vget_high_u8(b.low), offset), less(vget_low_u8(b.high), offset),
           less(vget_high_u8(b.high), offset)}};
}
inline Quants widen_signed(Bytes b) {
  int8x16_t low = vreinterpretq_s8_u8(b.low), high = vreinterpretq_s8_u8(b.high);
  return {{vmovl_s8(vget_low_s8(low)), vmovl_s8(vget_high_s8(low)), vmovl_s8(vget_low_s8(high)),
           vmovl_s8(vget_high_s8(high))}};
}
inline Quants load_quants(const int16_t* p) { return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}}; }
inline void store(const Quants& q, int16_t* p) {
  for (int i = 0; i < 4; ++i) vst1q_s16(p + 8 * i, q.at[i]);
}
inline int32x4_t products(int32x4_t total, int16x8_t w, int16x8_t x) {
  return vmlal_high_s16(vmlal_s16(total, vget_low_s16(w), vget_low_s16(x)), w, x);
}
inline int32x4_t half_dot(const Quants& w, const Quants& x, int from) {
  return products(products(vdupq_n_s32(0), w.at[from], x.at[from]), w.at[from + 1], x.at[from + 1]);
}
using Pair = float32x2_t;
inline Pair pair(float a, float b) { return vset_lane_f32(b, vdup_n_f32(a), 1); }
inline Pair load_pair(const float* p) { return vld1_f32(p); }
inline Pair halves(const uint8_t* p) {
  __fp16 both[2];
  std::memcpy(both, p, 4);
  return pair((float)both[0], (float)both[1]);
}
inline Pair times(Pair a, Pair b) { return vmul_f32(a, b); }
inline Pair plus(Pair a, Pair b) { return vadd_f32(a, b); }
inline float first(Pair a) { return vget_lane_f32(a, 0); }
inline float second(Pair a) { return vget_lane_f32(a, 1); }
inline Lanes dot_halves(Lanes acc, const Quants& w, const Quants& x, Pair scales) {
  return {vfmaq_lane_f32(acc.a, vcvtq_f32_s32(half_dot(w, x, 0)), scales, 0),
          vfmaq_lane_f32(acc.b, vcvtq_f32_s32(half_dot(w, x, 2)), scales, 1)};
}
inline Lanes dot(Lanes acc, const Quants& w, const Quants& x, Pair scale) {
  return dot_halves(acc, w, x, vdup_lane_f32(scale, 0));
}
#endif

#if !JAXRT_AVX2 && !JAXRT_AVX512 && !JAXRT_NEON
struct Quants {
  int16_t at[32];
};
struct Bytes {
  uint8_t at[32];
};
inline Bytes thirty_two(const uint8_t* p) {
  Bytes out;
  std::memcpy(out.at, p, 32);
  return out;
}
template <int SHIFT>
inline Bytes bits(Bytes b, int mask) {
  for (uint8_t& each : b.at) each = (uint8_t)(each >> SHIFT & mask);
  return b;
}
template <int SHIFT>
inline Bytes put(Bytes b, Bytes more) {
  for (int i = 0; i < 32; ++i) b.at[i] |= (uint8_t)(more.at[i] << SHIFT);
  return b;
}
inline Bytes nibbles(const uint8_t* p) {
  Bytes out;
  for (int i = 0; i < 16; ++i) out.at[i] = p[i] & 15, out.at[i + 16] = p[i] >> 4;
  return out;
}
inline Bytes spread(uint32_t word) {
  Bytes out;
  for (int i = 0; i < 32; ++i) out.at[i] = word >> i & 1;
  return out;
}
inline Quants widen(Bytes b, int offset) {
  Quants out;
  for (int i = 0; i < 32; ++i) out.at[i] = (int16_t)(b.at[i] - offset);
  return out;
}
inline Quants widen_signed(Bytes b) {
  Quants out;
  for (int i = 0; i < 32; ++i) out.at[i] = (int8_t)b.at[i];
  return out;
}
inline Quants load_quants(const int16_t* p) {
  Quants out;
  std::memcpy(out.at, p, sizeof out.at);
  return out;
}
inline void store(const Quants& q, int16_t* p) { std::memcpy(p, q.at, sizeof q.at); }
struct Pair {
  float a, b;
};
inline Pair pair(float a, float b) { return {a, b}; }
inline Pair load_pair(const float* p) { return {p[0], p[1]}; }
inline Pair times(Pair a, Pair b) { return {a.a * b.a, a.b * b.b}; }
inline Pair plus(Pair a, Pair b) { return {a.a + b.a, a.b + b.b}; }
inline float first(Pair a) { return a.a; }
inline float second(Pair a) { return a.b; }
inline Lanes dot_halves(Lanes acc, const Quants& w, const Quants& x, Pair scales) {
  int32_t low = 0, high = 0;
  for (int i = 0; i < 16; ++i) low += w.at[i] * x.at[i], high += w.at[i + 16] * x.at[i + 16];
  acc.at[0] += (float)low * scales.a;
  acc.at[1] += (float)high * scales.b;
  return acc;
}
inline Lanes dot(Lanes acc, const Quants& w, const Quants& x, Pair scale) {
  return dot_halves(acc, w, x, {scale.a, scale.a});
}
inline float half(uint16_t bits) {  // IEEE 754 binary16
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return std::ldexp((float)fraction, -24) * (sign ? -1.0f : 1.0f);
  uint32_t wide = sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline Pair halves(const uint8_t* p) { return {half((uint16_t)(p[0] | p[1] << 8)), half((uint16_t)(p[2] | p[3] << 8))}; }
#endif
