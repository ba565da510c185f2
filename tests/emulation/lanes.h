// What lanes.cpp and checks.cpp know of each other: which lane runs, and where in its block's and warp's course it is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace host {
// When a lane did something. Two things of lanes of one block are in order where a barrier was between them, of lanes of
// one warp also where a warp's barrier was; of two blocks they never are.
struct Moment {
    uint32_t lane = 0;  // 1 + its number among the lanes of all blocks; 0: never
    uint32_t block = 0, warp = 0, block_turn = 0, warp_turn = 0;
};
struct Running {
    Moment moment;
    const char *stack = nullptr, *stack_end = nullptr;
    const char *shared = nullptr, *shared_end = nullptr;
};
const Running* running();                        // nullptr outside of a kernel
[[noreturn]] void fail(const std::string& what);  // ends the launch

// checks.cpp
void check_begins(unsigned spans, const uint64_t* addresses, const uint64_t* sizes);
void check_ends(uint64_t* moved);  // bytes of memory read before they were written, and written
void check_shared(const char* memory, size_t bytes);  // of a block that starts: nobody has written it
void check_shared_ends(const char* memory, size_t bytes);
}  // namespace host
