// Block formats of GGUF: how a block of weights stands in memory. A format gives its 32 weights from `part` on as
// integers with a scale, and where it has them a minimum, or a second scale for the second 16:
//   weight i = scale * quant i (+ minimum).
// The pair is scale and minimum, scale and second scale, or scale and anything.
// The layouts are those of the GGML library's types of the same names; halves are IEEE binary16, little-endian.

struct Part {
  Quants quants;
  Pair scales;
};

inline uint32_t word(const uint8_t* p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }

struct Q8_0 {  // half scale; 32 signed bytes
  static constexpr int WEIGHTS = 32, BYTES = 34;
  static constexpr bool MINIMUM = false, HALVES = false;
  static Part part(const uint8_t* block, int) { return {widen_signed(thirty_two(block + 2)), halves(block)}; }
};

struct Q4_0 {  // half scale; 16 bytes of two halves, less 8
  static constexpr int WEIGHTS = 32, BYTES = 18;
  static constexpr bool MINIMUM = false, HALVES = false;
  static Part part(const uint8_t* block, int) { return {widen(nibbles(block + 2), 8), halves(block)}; }
};

struct Q4_1 {  // half scale, half minimum; 16 bytes of two halves
  static constexpr int WEIGHTS = 32, BYTES = 20;
  static constexpr bool MINIMUM = true, HALVES = false;
  static Part part(const uint8_t* block, int) { return {widen(nibbles(block + 4), 0), halves(block)}; }
};

struct Q5_0 {  // half scale; 32 fifth bits; 16 bytes of two halves, less 16
  static constexpr int WEIGHTS = 32, BYTES = 22;
  static constexpr bool MINIMUM = false, HALVES = false;
  static Part part(const uint8_t* block, int) {
    return {widen(put<4>(nibbles(block + 6), spread(word(block + 2))), 16), halves(block)};
  }
};

struct Q5_1 {  // half scale, half minimum; 32 fifth bits; 16 bytes of two halves
  static constexpr int WEIGHTS = 32, BYTES = 24;
  static constexpr bool MINIMUM = true, HALVES = false;
  static Part part(const uint8_t* block, int) {
    return {widen(put<4>(nibbles(block + 8), spread(word(block + 4))), 0), halves(block)};
  }
};

// Scale and minimum, of 6 bits each, of one of eight parts: in 12 bytes. A minimum is subtracted.
inline Pair six_bits(const uint8_t* p, int part) {
  if (part < 4) return pair((float)(p[part] & 63), -(float)(p[part + 4] & 63));
  return pair((float)((p[part + 4] & 15) | (p[part - 4] >> 6) << 4), -(float)((p[part + 4] >> 4) | (p[part] >> 6) << 4));
}

inline Bytes four_bits(const uint8_t* p, int part) {  // 32 bytes for two parts: low halves, then high ones
  Bytes both = thirty_two(p + part / 2 * 32);
  return part % 2 ? bits<4>(both, 15) : bits<0>(both, 15);
}

inline Bytes one_bit(Bytes b, int at) {
  switch (at) {
    case 0: return bits<0>(b, 1);
    case 1: return bits<1>(b, 1);
    case 2: return bits<2>(b, 1);
    case 3: return bits<3>(b, 1);
    case 4: return bits<4>(b, 1);
    case 5: return bits<5>(b, 1);
    case 6: return bits<6>(b, 1);
    default: return bits<7>(b, 1);
  }
}

struct Q4_K {  // half scale, half minimum; 12 bytes of part scales and minima; 128 bytes of two halves
  static constexpr int WEIGHTS = 256, BYTES = 144;
  static constexpr bool MINIMUM = true, HALVES = false;
  static Part part(const uint8_t* block, int part) {
    return {widen(four_bits(block + 16, part), 0), times(halves(block), six_bits(block + 4, part))};
  }
};

struct Q5_K {  // as Q4_K, with 32 bytes of fifth bits, bit j of each for part j
  static constexpr int WEIGHTS = 256, BYTES = 176;
  static constexpr bool MINIMUM = true, HALVES = false;
  static Part part(const uint8_t* block, int part) {
    Bytes five = put<4>(four_bits(block + 48, part), one_bit(thirty_two(block + 16), part));
    return {widen(five, 0), times(halves(block), six_bits(block + 4, part))};
  }
};

struct Q6_K {  // 128 bytes of two halves; 64 of two upper bits; 16 signed scales, one for 16 weights; half scale
  static constexpr int WEIGHTS = 256, BYTES = 210;
  static constexpr bool MINIMUM = false, HALVES = true;
  static Part part(const uint8_t* block, int part) {
    int quarter = part % 4;
    const uint8_t* fours = block + part / 4 * 64 + quarter % 2 * 32;
    Bytes low = quarter < 2 ? bits<0>(thirty_two(fours), 15) : bits<4>(thirty_two(fours), 15);
    Bytes twos = thirty_two(block + 128 + part / 4 * 32);
    switch (quarter) {
      case 0: twos = bits<0>(twos, 3); break;
      case 1: twos = bits<2>(twos, 3); break;
      case 2: twos = bits<4>(twos, 3); break;
      default: twos = bits<6>(twos, 3);
    }
    const int8_t* scales = (const int8_t*)block + 192 + 2 * part;
    const uint8_t twice[4] = {block[208], block[209], block[208], block[209]};
    return {widen(put<4>(low, twos), 32), times(halves(twice), pair(scales[0], scales[1]))};
  }
};
