// Attention over a cache, for one instruction set: keys [K, H, S], values [K, S, H], of one row. Included after matmul.h.
//
// One query: slots are taken in pieces; a piece gives its highest score, the sum of its weights relative to that, and the
// values they mix, which are put together at the end (Milakov and Gimelshein 2018; Dao et al. 2023).

constexpr int SLOTS = 4 * LANES;  // scored at a time

// e^x for x <= 0, to two units in the last place: 2^n e^r with |r| <= ln 2 / 2, and Cephes' polynomial for e^r.
inline void exponentials(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::max(x[i], -87.0f);
    const float shifted = value * 1.44269504f + 12582912.0f;  // the number of twos stands in the last bits
    const float twos = shifted - 12582912.0f;
    const float r = (value - twos * 0.693359375f) - twos * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4b400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    x[i] = p * scale;
  }
}

inline float largest(const float* x, int64_t count) {
  float most = x[0];
  int64_t i = 0;
  if (count >= LANES) {
    Floats each = load(x);
    for (i = LANES; i + LANES <= count; i += LANES) each = larger(load(x + i), each);
    float lanes[LANES];
    store(each, lanes);
    for (float lane : lanes) most = lane > most ? lane : most;
  }
  for (; i < count; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// Scores become weights, e^(score - most); their sum is given, NaN where a score is not finite.
inline float weigh(float* x, int64_t count, float most) {
  for (int64_t i = 0; i < count; ++i) x[i] -= most;
  Floats lost = zero(), both[2] = {zero(), zero()};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) lost = fma(load(x + i), zero(), lost);
  float total = sum(lost);
  for (; i < count; ++i) total += x[i] * 0.0f;
  exponentials(x, count);
  for (i = 0; i + 2 * LANES <= count; i += 2 * LANES)
    for (int j = 0; j < 2; ++j) both[j] = fma(load(x + i + j * LANES), all(1), both[j]);
  for (; i < count; ++i) total += x[i];
  return total + sum(both[0]) + sum(both[1]);
}

template <int HEADS, typename Cache>
inline void score_slots(const float* q, const Cache* keys, float* scores, int64_t width, int64_t capacity,
                        int64_t pitch) {
  Floats acc[HEADS][4];
  for (auto& a : acc)
    for (auto& b : a) b = zero();
  for (int64_t h = 0; h < width; ++h) {
    const Cache* from = keys + h * capacity;
    __builtin_prefetch(from + SLOTS);
    __builtin_prefetch(from + SLOTS + SLOTS / 2);
    Floats k[4];
    for (int i = 0; i < 4; ++i) k[i] = load(from + i * LANES);
    for (int g = 0; g < HEADS; ++g) {
      const Floats each = all(q[g * width + h]);
      for (int i = 0; i < 4; ++i) acc[g][i] = fma(k[i], each, acc[g][i]);
    }
  }
  for (int g = 0; g < HEADS; ++g)
    for (int i = 0; i < 4; ++i) store(acc[g][i], scores + g * pitch + i * LANES);
}

template <int HEADS, typename Cache>
inline void mix_slots(const float* weights, const Cache* values, float* mixed, int64_t width, int64_t count,
                      int64_t pitch) {
  for (int64_t h = 0; h < width; h += 4 * LANES) {
    const int vectors = (int)std::min<int64_t>(4, (width - h) / LANES);
    Floats acc[HEADS][4];
    for (auto& a : acc)
      for (auto& b : a) b = zero();
    for (int64_t s = 0; s < count; ++s) {
      const Cache* from = values + s * width + h;
      if (vectors == 4) {
        Floats v[4];
        for (int i = 0; i < 4; ++i) v[i] = load(from + i * LANES);
        for (int g = 0; g < HEADS; ++g) {
          const Floats each = all(weights[g * pitch + s]);
          for (int i = 0; i < 4; ++i) acc[g][i] = fma(v[i], each, acc[g][i]);
        }
      } else {
        for (int i = 0; i < vectors; ++i)
          for (int g = 0; g < HEADS; ++g)
            acc[g][i] = fma(load(from + i * LANES), all(weights[g * pitch + s]), acc[g][i]);
      }
    }
    for (int g = 0; g < HEADS; ++g)
      for (int i = 0; i < vectors; ++i) store(acc[g][i], mixed + g * width + h + i * LANES);
  }
}

// `HEADS` query heads of one key head over slots [first, last); `scores` has room for HEADS * pitch.
template <int HEADS, typename Cache>
void attend_heads(const float* q, const Cache* keys, const Cache* values, const float* key_scales,
                  const float* value_scales, float* scores, float* highest, float* total, float* mixed, int64_t width,
                  int64_t capacity, int64_t first, int64_t last) {
  const int64_t count = last - first, pitch = (count + SLOTS - 1) / SLOTS * SLOTS;
  int64_t s = 0;
  for (; s < count && first + s + SLOTS <= capacity; s += SLOTS)
    score_slots<HEADS>(q, keys + first + s, scores + s, width, capacity, pitch);
  for (; s < count; ++s)  // where the cache ends before the last slots do
    for (int g = 0; g < HEADS; ++g) {
      float score = 0;
      for (int64_t h = 0; h < width; ++h) score += q[g * width + h] * as_float(keys[h * capacity + first + s]);
      scores[g * pitch + s] = score;
    }
  for (int g = 0; g < HEADS; ++g) {
    float* own = scores + g * pitch;
    if (key_scales)
      for (int64_t i = 0; i < count; ++i) own[i] *= key_scales[first + i];
    highest[g] = largest(own, count);
    total[g] = weigh(own, count, highest[g]);
    if (value_scales)
      for (int64_t i = 0; i < count; ++i) own[i] *= value_scales[first + i];
  }
  mix_slots<HEADS>(scores, values + first * width, mixed, width, count, pitch);
}

template <typename Cache>
void attend_piece(const float* q, const void* keys, const void* values, const float* key_scales,
                  const float* value_scales, float* scores, float* highest, float* total, float* mixed, int64_t heads,
                  int64_t width, int64_t capacity, int64_t first, int64_t last) {
  const Cache *k = (const Cache*)keys, *v = (const Cache*)values;
  for (int64_t g = 0; g < heads;) {
    auto run = [&](auto some) {
      constexpr int HEADS = decltype(some)::value;
      attend_heads<HEADS>(q + g * width, k, v, key_scales, value_scales, scores, highest + g, total + g,
                          mixed + g * width, width, capacity, first, last);
      g += HEADS;
    };
    if (heads - g >= 3)
      run(std::integral_constant<int, 3>());
    else if (heads - g == 2)
      run(std::integral_constant<int, 2>());
    else
      run(std::integral_constant<int, 1>());
  }
}

// Many queries, a block of slots after the other with a running maximum: scores and mixed values of a block are products
// with panels of keys and of values, which are float32 whatever the cache is.
constexpr int BLOCK = 128;

// `count` numbers as float32, and zeros up to a panel.
template <typename Cache>
inline void fill_panel(float* to, const Cache* from, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(load(from + i), to + i);
  for (; i < count; ++i) to[i] = as_float(from[i]);
  for (; i < PANEL; ++i) to[i] = 0;
}

inline int64_t panels(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// How many numbers attend_block works in.
int64_t block_room(int64_t rows, int64_t width) {
  return (width + BLOCK) * PANEL + rows * (BLOCK + panels(width) + 3);
}

// `rows` queries of one key head, each over its first `seen` slots, `most` the largest of these; mixed [rows, width].
template <typename Cache>
void attend_block(const float* q, const int64_t* seen, int64_t most, const void* keys, const void* values,
                  const float* key_scales, const float* value_scales, float* room, float* mixed, int64_t rows,
                  int64_t width, int64_t capacity) {
  const int64_t pitch = panels(width);
  float *key_panel = room, *value_panel = key_panel + width * PANEL, *scores = value_panel + BLOCK * PANEL;
  float *more = scores + rows * BLOCK, *highest = more + rows * pitch, *total = highest + rows, *fading = total + rows;
  std::fill(highest, highest + rows, -INFINITY);
  std::fill(total, total + rows, 0.0f);
  std::fill(mixed, mixed + rows * width, 0.0f);
  for (int64_t first = 0; first < most; first += BLOCK) {
    const int64_t count = std::min<int64_t>(BLOCK, most - first);
    for (int64_t s = 0; s < count; s += PANEL) {
      const int64_t wide = std::min<int64_t>(PANEL, count - s);
      for (int64_t h = 0; h < width; ++h)
        fill_panel(key_panel + h * PANEL, (const Cache*)keys + h * capacity + first + s, wide);
      panel_rows(key_panel, q, scores + s, rows, width, width, BLOCK, PANEL);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* own = scores + r * BLOCK;
      const int64_t some = std::clamp<int64_t>(seen[r] - first, 0, count);
      std::fill(own + some, own + BLOCK, 0.0f);
      fading[r] = 1;
      if (!some) continue;
      if (key_scales)
        for (int64_t i = 0; i < some; ++i) own[i] *= key_scales[first + i];
      const float before = highest[r], now = std::max(before, largest(own, some));
      highest[r] = now;
      fading[r] = std::exp(before - now);
      total[r] = total[r] * fading[r] + weigh(own, some, now);
      if (value_scales)
        for (int64_t i = 0; i < some; ++i) own[i] *= value_scales[first + i];
    }
    for (int64_t h = 0; h < width; h += PANEL) {
      const int64_t wide = std::min<int64_t>(PANEL, width - h);
      for (int64_t s = 0; s < count; ++s)
        fill_panel(value_panel + s * PANEL, (const Cache*)values + (first + s) * width + h, wide);
      panel_rows(value_panel, scores, more + h, rows, count, BLOCK, pitch, PANEL);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < width; ++h) mixed[r * width + h] = mixed[r * width + h] * fading[r] + more[r * pitch + h];
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < width; ++h) mixed[r * width + h] /= total[r];
}

// Root mean square normalisation of one row.
void norm(const float* x, const float* weight, float* y, int64_t width, float eps) {
  Floats squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) {
      const Floats each = load(x + i + j * LANES);
      squares[j] = fma(each, each, squares[j]);
    }
  float total = sum(squares[0]) + sum(squares[1]) + sum(squares[2]) + sum(squares[3]);
  for (; i < width; ++i) total += x[i] * x[i];
  const float scale = 1 / std::sqrt(total / (float)width + eps);
  for (i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
}
