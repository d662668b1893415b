// Products of a few rows with a matrix, over outputs [first, last), for one instruction set. Included after formats.h.
// Weights are [outputs, inputs] as checkpoints have them; rows are x [rows, inputs]; results y [rows, outputs].

// --- float32 and bfloat16 weights ------------------------------------------------------------------------------------

template <int OUTPUTS, int ROWS, typename Weight>
inline void float_tile(const Weight* w, const float* x, float* y, int64_t inputs, int64_t outputs) {
  // several sums for one output hide the latency of adding
  constexpr int SUMS = OUTPUTS * ROWS >= 8 ? 1 : 8 / (OUTPUTS * ROWS);
  Floats acc[OUTPUTS][ROWS][SUMS];
  for (auto& a : acc)
    for (auto& b : a)
      for (auto& c : b) c = zero();
  auto add = [&](int64_t k, int s) {
    Floats weights[OUTPUTS];
    for (int o = 0; o < OUTPUTS; ++o) weights[o] = load(w + o * inputs + k);
    for (int r = 0; r < ROWS; ++r) {
      Floats each = load(x + r * inputs + k);
      for (int o = 0; o < OUTPUTS; ++o) acc[o][r][s] = fma(weights[o], each, acc[o][r][s]);
    }
  };
  int64_t k = 0;
  for (; k + LANES * SUMS <= inputs; k += LANES * SUMS)
    for (int s = 0; s < SUMS; ++s) add(k + s * LANES, s);
  for (; k + LANES <= inputs; k += LANES) add(k, 0);
  for (int o = 0; o < OUTPUTS; ++o)
    for (int r = 0; r < ROWS; ++r) {
      float total = 0;
      for (int s = 0; s < SUMS; ++s) total += sum(acc[o][r][s]);
      for (int64_t rest = k; rest < inputs; ++rest) total += as_float(w[o * inputs + rest]) * x[r * inputs + rest];
      y[r * outputs + o] = total;
    }
}

template <int OUTPUTS, typename Weight>
inline void float_rows(const Weight* w, const float* x, float* y, int64_t rows, int64_t inputs, int64_t outputs) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) float_tile<OUTPUTS, 4>(w, x + r * inputs, y + r * outputs, inputs, outputs);
  if (rows - r >= 2) {
    float_tile<OUTPUTS, 2>(w, x + r * inputs, y + r * outputs, inputs, outputs);
    r += 2;
  }
  if (r < rows) float_tile<OUTPUTS, 1>(w, x + r * inputs, y + r * outputs, inputs, outputs);
}

template <typename Weight>
void float_matmul(const void* weights, const float* x, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                  int64_t first, int64_t last) {
  const Weight* w = (const Weight*)weights;
  int64_t o = first;
  if (rows > 1)  // one row is the memory's, which likes a single stream best: 25 against 19 GB/s
    for (; o + 2 <= last; o += 2) float_rows<2>(w + o * inputs, x, y + o, rows, inputs, outputs);
  for (; o < last; ++o) float_rows<1>(w + o * inputs, x, y + o, rows, inputs, outputs);
}

// Rows of one tile, as many as the registers hold: of few rows and of many.
#if JAXRT_AVX512
constexpr int FEW = 8, TILE = 12;
#else
constexpr int FEW = 4, TILE = 6;
#endif

constexpr int AHEAD = 2048;  // bytes of each output's weights that are asked for in advance: 12 -> 17 GB/s for Q8_0

// --- packed weights ----------------------------------------------------------------------------------------------------

// Activations as int16; for every 32 a pair of their scale and their sum, which scale and minimum of the weights are
// multiplied with. Sixteen bits err by some 3e-5 of the largest product, eight by 1e-2; they take half as long again.
void quantize(const float* x, int16_t* quants, float* scales, int64_t inputs) {
  for (int64_t b = 0; b < inputs / 32; ++b) {
    const float* from = x + b * 32;
    float most = 0, poison = 0;
    for (int i = 0; i < 32; ++i) {
      most = std::max(most, std::fabs(from[i]));
      poison += from[i] * 0.0f;  // NaN where anything is not finite, as the product shall be
    }
    float scale = most / 32767, back = most > 0 && std::isfinite(32767 / most) ? 32767 / most : 0;
    int32_t total = 0;
    for (int i = 0; i < 32; ++i) {
      float value = from[i] * back;
      int32_t quant = poison == 0 ? (int32_t)(value + (value < 0 ? -0.5f : 0.5f)) : 0;
      quants[b * 32 + i] = (int16_t)quant;
      total += quant;
    }
    scales[2 * b] = scale + poison;
    scales[2 * b + 1] = (scale + poison) * (float)total;
  }
}

template <typename Format, int OUTPUTS, int ROWS>
inline void packed_tile(const uint8_t* w, const int16_t* quants, const float* scales, float* y,
                        int64_t inputs, int64_t outputs) {
  constexpr int PARTS = Format::WEIGHTS / 32;
  const int64_t stride = inputs / Format::WEIGHTS * Format::BYTES, blocks = inputs / Format::WEIGHTS;
  const int64_t parts = inputs / 32;
  Lanes acc[OUTPUTS][ROWS];
  Pair minima[OUTPUTS][ROWS];
  for (auto& a : acc)
    for (auto& b : a) b = no_lanes();
  for (auto& a : minima)
    for (auto& b : a) b = pair(0, 0);
  for (int64_t block = 0; block < blocks; ++block)
    for (int p = 0; p < PARTS; ++p) {
      const int64_t at = block * PARTS + p;
      Part part[OUTPUTS];
      for (int o = 0; o < OUTPUTS; ++o) {
        const uint8_t* from = w + o * stride + block * Format::BYTES;
        part[o] = Format::part(from, p);
        if (p % 2 == 0) __builtin_prefetch(from + p * Format::BYTES / PARTS + AHEAD);
      }
      for (int r = 0; r < ROWS; ++r) {
        const Quants each = load_quants(quants + r * inputs + at * 32);
        const float* scale = scales + 2 * (r * parts + at);
        for (int o = 0; o < OUTPUTS; ++o) {
          if constexpr (Format::HALVES) {
            acc[o][r] = dot_halves(acc[o][r], part[o].quants, each, times(part[o].scales, pair(*scale, *scale)));
          } else {
            const Pair both = times(part[o].scales, load_pair(scale));
            acc[o][r] = dot(acc[o][r], part[o].quants, each, both);
            if constexpr (Format::MINIMUM) minima[o][r] = plus(minima[o][r], both);
          }
        }
      }
    }
  for (int o = 0; o < OUTPUTS; ++o)
    for (int r = 0; r < ROWS; ++r) y[r * outputs + o] = sum(acc[o][r]) + (Format::MINIMUM ? second(minima[o][r]) : 0);
}

template <typename Format, int OUTPUTS>
inline void packed_rows(const uint8_t* w, const int16_t* quants, const float* scales, float* y,
                        int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t parts = inputs / 32;
  int64_t r = 0;
  for (; r + FEW <= rows; r += FEW)
    packed_tile<Format, OUTPUTS, FEW>(w, quants + r * inputs, scales + 2 * r * parts, y + r * outputs, inputs,
                                      outputs);
  if (r + 4 <= rows && FEW > 4) {
    packed_tile<Format, OUTPUTS, 4>(w, quants + r * inputs, scales + 2 * r * parts, y + r * outputs, inputs,
                                    outputs);
    r += 4;
  }
  for (; r < rows; ++r)
    packed_tile<Format, OUTPUTS, 1>(w, quants + r * inputs, scales + 2 * r * parts, y + r * outputs, inputs,
                                    outputs);
}

template <typename Format>
void packed_matmul(const uint8_t* w, const int16_t* quants, const float* scales, float* y,
                   int64_t rows, int64_t inputs, int64_t outputs, int64_t first, int64_t last) {
  const int64_t stride = inputs / Format::WEIGHTS * Format::BYTES;
  int64_t o = first;
  for (; o + 2 <= last; o += 2)
    packed_rows<Format, 2>(w + o * stride, quants, scales, y + o, rows, inputs, outputs);
  for (; o < last; ++o) packed_rows<Format, 1>(w + o * stride, quants, scales, y + o, rows, inputs, outputs);
}

template <typename Format>
inline void unpack_part(const uint8_t* block, int p, float* to) {  // 32 weights
  const Part part = Format::part(block, p);
  const float scale = first(part.scales), other = second(part.scales);
  int16_t quants[32];
  store(part.quants, quants);
  if constexpr (Format::HALVES) {
    for (int i = 0; i < 16; ++i) to[i] = scale * quants[i];
    for (int i = 16; i < 32; ++i) to[i] = other * quants[i];
  } else if constexpr (Format::MINIMUM) {
    for (int i = 0; i < 32; ++i) to[i] = scale * quants[i] + other;
  } else {
    for (int i = 0; i < 32; ++i) to[i] = scale * quants[i];
  }
}

// Many rows: a panel of outputs is unpacked, inputs by outputs, into memory that stays in the second cache, and
// multiplied by all rows in float32 (Goto and van de Geijn 2008). The panel is the unit in which threads take outputs.
constexpr int PANEL = 2 * LANES;

template <int ROWS>
inline void panel_tile(const float* panel, const float* x, float* y, int64_t inputs, int64_t stride, int64_t outputs,
                       int width) {
  Floats acc[ROWS][2];
  for (auto& a : acc) a[0] = a[1] = zero();
  for (int64_t k = 0; k < inputs; ++k) {
    const Floats low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Floats each = all(x[r * stride + k]);
      acc[r][0] = fma(low, each, acc[r][0]);
      acc[r][1] = fma(high, each, acc[r][1]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float out[PANEL];
    store(acc[r][0], out);
    store(acc[r][1], out + LANES);
    std::memcpy(y + r * outputs, out, width * sizeof(float));
  }
}

// Rows `stride` apart times a panel [inputs, PANEL]: `width` results of each, `outputs` apart.
inline void panel_rows(const float* panel, const float* x, float* y, int64_t rows, int64_t inputs, int64_t stride,
                       int64_t outputs, int width) {
  int64_t r = 0;
  for (; r + TILE <= rows; r += TILE)
    panel_tile<TILE>(panel, x + r * stride, y + r * outputs, inputs, stride, outputs, width);
  for (; r + 2 <= rows; r += 2) panel_tile<2>(panel, x + r * stride, y + r * outputs, inputs, stride, outputs, width);
  for (; r < rows; ++r) panel_tile<1>(panel, x + r * stride, y + r * outputs, inputs, stride, outputs, width);
}

// How a panel of `width` outputs from `o` on is filled: [inputs, PANEL], zeros beyond the width.
template <typename Format>
struct PackedPanel {
  const uint8_t* w;
  int64_t inputs;
  void fill(float* panel, int64_t o, int width) const {
    const int64_t stride = inputs / Format::WEIGHTS * Format::BYTES;
    float part[PANEL][32];
    if (width < PANEL) std::memset(part, 0, sizeof part);
    for (int64_t k = 0; k < inputs; k += 32) {
      const int64_t block = k / Format::WEIGHTS * Format::BYTES;
      for (int i = 0; i < width; ++i)
        unpack_part<Format>(w + (o + i) * stride + block, (int)(k % Format::WEIGHTS / 32), part[i]);
      for (int i = 0; i < PANEL; i += 8)
        for (int j = 0; j < 32; j += 8) transpose(part[i] + j, 32, panel + (k + j) * PANEL + i, PANEL);
    }
  }
};

template <typename Weight>
struct FloatPanel {
  const Weight* w;
  int64_t inputs;
  void fill(float* panel, int64_t o, int width) const {
    int64_t k = 0;
    if (std::is_same_v<Weight, float> && width == PANEL)
      for (; k + 8 <= inputs; k += 8)
        for (int i = 0; i < PANEL; i += 8)
          transpose((const float*)w + (o + i) * inputs + k, inputs, panel + k * PANEL + i, PANEL);
    for (; k < inputs; ++k)
      for (int i = 0; i < PANEL; ++i) panel[k * PANEL + i] = i < width ? as_float(w[(o + i) * inputs + k]) : 0;
  }
};

template <typename Source>
void many_rows(const Source& source, const float* x, float* y, int64_t rows, int64_t inputs, int64_t outputs,
               int64_t first, int64_t last) {
  thread_local std::vector<float> memory;
  memory.resize(std::max<size_t>(memory.size(), inputs * PANEL));
  float* panel = memory.data();
  for (int64_t o = first; o < last; o += PANEL) {
    const int width = (int)std::min<int64_t>(PANEL, last - o);
    source.fill(panel, o, width);
    panel_rows(panel, x, y + o, rows, inputs, inputs, outputs, width);
  }
}

template <typename Format>
void packed_many(const void* w, const float* x, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t first,
                 int64_t last) {
  many_rows(PackedPanel<Format>{(const uint8_t*)w, inputs}, x, y, rows, inputs, outputs, first, last);
}

template <typename Weight>
void float_many(const void* w, const float* x, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t first,
                int64_t last) {
  many_rows(FloatPanel<Weight>{(const Weight*)w, inputs}, x, y, rows, inputs, outputs, first, last);
}
