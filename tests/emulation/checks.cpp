// Is what a kernel reads and writes its own to touch, and in order? The compiler calls one of these functions before each
// access (-fsanitize=thread); here stand ours in place of the sanitizer's own.
//
// Refused are: an access outside of all memory that the launch was given; one that is not aligned to its size; a read of
// shared memory that no lane has written; and a race: two lanes at one byte, one of them writing, that no barrier orders.
#include "lanes.h"

#include <algorithm>
#include <map>
#include <vector>

namespace host {
namespace {
struct Cell {  // of one byte: who wrote it last, and two of those who have read it since
    Moment write, read, other;
    bool was_read = false, was_written = false;
};
struct Span {
    uint64_t begin;
    bool shared;
    std::vector<Cell> cells;
};
std::map<uint64_t, Span> spans;  // by their end

bool in_order(const Moment& before, const Moment& later) {
    if (before.lane == 0 || before.lane == later.lane) return true;
    if (before.block != later.block) return false;
    if (before.block_turn != later.block_turn) return true;
    return before.warp == later.warp && before.warp_turn != later.warp_turn;
}

std::string told(const Moment& one, const Moment& other) {
    return one.block != other.block ? "block " + std::to_string(other.block) : "another lane of its block";
}

void access(const void* pointer, size_t size, bool writes, bool aligned) {
    const Running* run = running();
    if (!run) return;
    auto at = reinterpret_cast<const char*>(pointer);
    if (at >= run->stack && at < run->stack_end) return;
    auto address = reinterpret_cast<uint64_t>(pointer);
    auto refuse = [&](const std::string& why) {
        fail((writes ? "writes " : "reads ") + std::to_string(size) + " bytes " + why);
    };
    if (aligned && address % size) refuse("that are not aligned");
    auto found = spans.upper_bound(address);
    if (found == spans.end() || found->second.begin > address || found->first < address + size)
        refuse("outside of its memory");
    Span& span = found->second;
    if (span.shared && !(at >= run->shared && at < run->shared_end)) refuse("of another block's shared memory");
    const Moment& now = run->moment;
    for (uint64_t i = address - span.begin; i < address - span.begin + size; ++i) {
        Cell& cell = span.cells[i];
        if (!writes && span.shared && cell.write.lane == 0) refuse("of shared memory that nobody has written");
        if (!in_order(cell.write, now)) refuse("in a race: " + told(now, cell.write) + " writes them");
        if (writes) {
            for (const Moment* reader : {&cell.read, &cell.other})
                if (!in_order(*reader, now)) refuse("in a race: " + told(now, *reader) + " reads them");
            cell.write = now, cell.read = cell.other = Moment{}, cell.was_written = true;
        } else {
            if (cell.read.lane != now.lane && !in_order(cell.read, now)) cell.other = cell.read;
            cell.read = now, cell.was_read |= !cell.was_written;
        }
    }
}
}  // namespace

void check_begins(unsigned count, const uint64_t* addresses, const uint64_t* sizes) {
    std::vector<std::pair<uint64_t, uint64_t>> given;
    for (unsigned i = 0; i < count; ++i)
        if (sizes[i]) given.push_back({addresses[i], addresses[i] + sizes[i]});
    std::sort(given.begin(), given.end());
    for (size_t i = 0; i < given.size();) {  // views that overlap are one piece of memory
        auto [begin, end] = given[i++];
        while (i < given.size() && given[i].first < end) end = std::max(end, given[i++].second);
        spans[end] = Span{begin, false, std::vector<Cell>(end - begin)};
    }
}
void check_ends(uint64_t* moved) {
    moved[0] = moved[1] = 0;
    for (auto& [end, span] : spans)
        if (!span.shared)
            for (const Cell& cell : span.cells) moved[0] += cell.was_read, moved[1] += cell.was_written;
    spans.clear();
}
void check_shared_ends(const char* memory, size_t bytes) { spans.erase(reinterpret_cast<uint64_t>(memory) + bytes); }
void check_shared(const char* memory, size_t bytes) {
    auto begin = reinterpret_cast<uint64_t>(memory);
    if (bytes) spans[begin + bytes] = Span{begin, true, std::vector<Cell>(bytes)};
}
}  // namespace host

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(size)                                                                              \
    void __tsan_read##size(void* p) { host::access(p, size, false, true); }                         \
    void __tsan_write##size(void* p) { host::access(p, size, true, true); }                         \
    void __tsan_unaligned_read##size(void* p) { host::access(p, size, false, false); }              \
    void __tsan_unaligned_write##size(void* p) { host::access(p, size, true, false); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, unsigned long size) { host::access(p, size, false, false); }
void __tsan_write_range(void* p, unsigned long size) { host::access(p, size, true, false); }
}
