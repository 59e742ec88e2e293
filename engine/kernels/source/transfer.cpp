// What the KV transfer does to every byte on a CPU: slots of the pool to and from the wire, and the sums of a message.
#include <algorithm>

#include "vectors.h"

namespace {

// Past the caches goes what is more than they keep: to write it there, it would be read first.
template <int64_t BYTES, bool PAST>
void copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t rows, int64_t bytes) {
    for (int64_t row = 0; row < rows; ++row, to += to_stride, from += from_stride) {
        if constexpr (PAST) {
            for (int64_t at = 0; at < (BYTES ? BYTES : bytes); at += 64) shoal::copy_line_past_caches(to + at, from + at);
        } else {
            std::memcpy(to, from, BYTES ? BYTES : bytes);
        }
    }
}

// What the next block's copy will touch: the blocks of a request lie apart, and its layers have left the cache since.
void fetch(const char* at, int64_t bytes, bool to_write) {
    for (int64_t byte = 0; byte < bytes; byte += 64) {
        if (to_write)
            __builtin_prefetch(at + byte, 1, 2);
        else
            __builtin_prefetch(at + byte, 0, 2);
    }
}

using CopyRows = void (*)(char*, int64_t, const char*, int64_t, int64_t, int64_t);

CopyRows copy_rows_of(int64_t bytes, bool past) {
    switch (bytes) {
        case 64: return past ? copy_rows<64, true> : copy_rows<64, false>;
        case 128: return past ? copy_rows<128, true> : copy_rows<128, false>;
        case 256: return past ? copy_rows<256, true> : copy_rows<256, false>;
        default: return past ? copy_rows<0, true> : copy_rows<0, false>;
    }
}

constexpr int64_t kPastBytes = 1 << 20;  // of one call

}  // namespace

// pool [blocks][heads][block_size][row], heads counting K and V; wire [stop - start][heads][row]; ids: the blocks of slots
// start … stop - 1, from the one that holds `start` on. sizes: start, stop, heads, block_size, bytes of a row.
extern "C" void shoal_copy_slots(char* pool, char* wire, const int32_t* ids, const int64_t* sizes, int to_wire) {
    const int64_t start = sizes[0], stop = sizes[1], heads = sizes[2], block_size = sizes[3], row = sizes[4];
    const bool is_whole_lines = row % 64 == 0 && reinterpret_cast<uintptr_t>(pool) % 64 == 0;
    const bool past = !to_wire && is_whole_lines && (stop - start) * heads * row >= kPastBytes;
    const CopyRows copy = copy_rows_of(row, past);
    for (int64_t slot = start; slot < stop;) {
        const int64_t offset = slot % block_size, count = std::min(block_size - offset, stop - slot);
        const int64_t block = ids[slot / block_size - start / block_size];
        const int64_t next = slot + count, next_count = std::min(block_size, stop - next);
        const int64_t next_block = next < stop ? ids[next / block_size - start / block_size] : 0;
        for (int64_t head = 0; head < heads; ++head) {
            if (next < stop) {
                if (!past) fetch(pool + (next_block * heads + head) * block_size * row, next_count * row, !to_wire);
                fetch(wire + ((next - start) * heads + head * next_count) * row, next_count * row, to_wire);
            }
            char* mine = pool + ((block * heads + head) * block_size + offset) * row;
            char* theirs = wire + ((slot - start) * heads + head) * row;
            if (to_wire)
                copy(theirs, heads * row, mine, row, count, row);
            else
                copy(mine, row, theirs, heads * row, count, row);
        }
        slot += count;
    }
    if (past) _mm_sfence();  // before anybody is told that it is there
}

// Sums of data [rows][width] by column, added to `columns`, and by row.
extern "C" void shoal_sum_words(const uint64_t* data, int64_t rows, int64_t width, uint64_t* columns, uint64_t* by_row) {
    for (int64_t row = 0; row < rows; ++row) {
        const uint64_t* words = data + row * width;
        uint64_t sum = 0;
        for (int64_t at = 0; at < width; ++at) {
            columns[at] += words[at];
            sum += words[at];
        }
        by_row[row] = sum;
    }
}
