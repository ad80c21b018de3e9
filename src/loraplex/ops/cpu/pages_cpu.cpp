// Checksums of pool pages as they lie in memory. Plain C ABI, called through ctypes; the caller has checked the pages.
// Specification: 0x04E (validate what was copied, then publish).
#include <cstdint>

extern "C" {

// out[i] = the sum over the int32 words w_j of page pages[i] of (2j + 1) * w_j, modulo 2^64.
void page_checksums(const uint8_t* pool, int64_t page_bytes, const int64_t* pages, int64_t count, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* const words = reinterpret_cast<const int32_t*>(pool + pages[i] * page_bytes);
    int64_t sum = 0;
    for (int32_t j = 0; j < int32_t(page_bytes / 4); ++j) sum += int64_t(words[j]) * int64_t(2 * j + 1);
    out[i] = sum;
  }
}

}  // extern "C"
