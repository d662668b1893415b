// What one instruction set offers. Included last.

#define JAXRT_FORMAT(NAME) {packed_matmul<NAME>, packed_many<NAME>, NAME::WEIGHTS, NAME::BYTES}
const Kernels kernels = {
    JAXRT_NAME, PANEL, LANES, {float_matmul<float>, float_many<float>}, {float_matmul<uint16_t>, float_many<uint16_t>}, quantize,
    {attend_piece<float>, attend_block<float>}, {attend_piece<uint16_t>, attend_block<uint16_t>},
    {attend_piece<int8_t>, attend_block<int8_t>}, block_room, norm,
    {JAXRT_FORMAT(Q8_0), JAXRT_FORMAT(Q4_0), JAXRT_FORMAT(Q4_1), JAXRT_FORMAT(Q5_0), JAXRT_FORMAT(Q5_1),
     JAXRT_FORMAT(Q4_K), JAXRT_FORMAT(Q5_K), JAXRT_FORMAT(Q6_K)}};
#undef JAXRT_FORMAT
