/* The uniform number behind each sampled token, as specified by kernels/reference/draw_uniforms.py. */

static void NAME(draw_uniforms_item)(const void *args, long item) {
    const struct draw_uniforms_args *a = args;
    (void)item; /* one for all: too little to share */
    for (long r = 0; r < *a->num_rows; r++) {
        uint64_t position = a->positions[r], index = a->indices[r];
        uint32_t key[2] = {(uint32_t)a->seeds[r], (uint32_t)(a->seeds[r] >> 32)};
        uint32_t word[4] = {
            (uint32_t)position, (uint32_t)(position >> 32), (uint32_t)index, (uint32_t)(index >> 32)};
        for (int round = 0; round < 10; round++) {
            uint64_t first = (uint64_t)0xD2511F53 * word[0], second = (uint64_t)0xCD9E8D57 * word[2];
            word[0] = (uint32_t)(second >> 32) ^ word[1] ^ key[0];
            word[1] = (uint32_t)second;
            word[2] = (uint32_t)(first >> 32) ^ word[3] ^ key[1];
            word[3] = (uint32_t)first;
            key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
        }
        uint64_t bits = ((uint64_t)word[1] << 32 | word[0]) >> 11;
        a->uniforms[r] = (double)bits * 0x1p-53;
    }
}

struct job NAME(draw_uniforms)(const void *args) {
    return (struct job){NAME(draw_uniforms_item), args, 1, 0};
}
