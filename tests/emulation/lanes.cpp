// Who runs next? The lanes of up to `resident` thread blocks, as fibers of the calling thread. seed 0: in their order;
// else blocks start, and lanes go on, in a random order. A block's shared memory is full of NaN when it starts. Lanes
// that meet in different places end the launch with an error, and so do a lane that ends while others of its block wait
// at a barrier, and lanes that nobody can wake.
#include "lanes.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

namespace host {
namespace {
constexpr size_t STACK = 128 << 10;
constexpr unsigned WARP = 32;

struct Fiber;
struct Meeting {  // of lanes of a warp
    uint32_t mask = 0, arrived = 0;
    int line = 0;
    bool orders = false;
    std::vector<std::pair<Fiber*, unsigned>> waiting;  // and whose value each wants
    uint64_t values[WARP];
};
struct Team {  // a thread block
    unsigned block, alive;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Meeting> meetings;      // one a warp
    std::vector<uint32_t> warp_turns;
    uint32_t turn = 0;
    std::vector<Fiber*> at_barrier;
    int barrier_line = 0, votes = 1, told = 1;
    char *shared, *shared_end;
    std::unique_ptr<char[]> memory;
};
struct Fiber {
    Team* team;
    unsigned thread;
    ucontext_t context;
    char* stack;
    bool done = false;
    uint64_t answer = 0;
    int line = 0;
};

std::mutex one_at_a_time;
std::vector<char*> free_stacks;
std::vector<Fiber*> ready;
std::mt19937_64 order;
bool random_order;
void (*kernel)(void**);
void** kernel_arguments;
unsigned num_blocks, num_threads;
ucontext_t home;
Fiber* me;
Running now;
std::string error;

char* new_stack() {
    if (free_stacks.empty())
        return static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    char* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}

void set_moment() {
    Team* team = me->team;
    unsigned warp = me->thread / WARP;
    now.moment = {1 + team->block * num_threads + me->thread, team->block, warp, team->turn, team->warp_turns[warp]};
    now.stack = me->stack, now.stack_end = me->stack + STACK;
    now.shared = team->shared, now.shared_end = team->shared_end;
}

void leave_to(ucontext_t* from) {  // the next that is ready, or home
    Fiber* before = me;
    if (ready.empty() || !error.empty()) {
        me = nullptr;
        if (from) swapcontext(from, &home); else setcontext(&home);
        return;
    }
    size_t which = random_order ? order() % ready.size() : 0;
    me = ready[which];
    if (random_order) ready[which] = ready.back(), ready.pop_back(); else ready.erase(ready.begin());
    set_moment();
    if (me == before) return;
    if (from) swapcontext(from, &me->context); else setcontext(&me->context);
}

void wait_here() {
    Fiber* self = me;
    leave_to(&self->context);
    set_moment();  // whoever came back here has set `me`
}

void release_barrier(Team* team) {
    team->told = team->votes, team->votes = 1;
    ++team->turn;
    for (uint32_t& turn : team->warp_turns) ++turn;
    ready.insert(ready.end(), team->at_barrier.begin(), team->at_barrier.end());
    team->at_barrier.clear();
}

void entry() {
    kernel(kernel_arguments);
    Team* team = me->team;
    me->done = true;
    --team->alive;
    if (!team->at_barrier.empty())
        error = "lane " + std::to_string(me->thread) + " of block " + std::to_string(team->block) +
                " ends while others wait at the barrier of line " + std::to_string(team->barrier_line);
    if (team->alive == 0) {
        me = nullptr;
        setcontext(&home);
    }
    leave_to(nullptr);
}

std::unique_ptr<Team> start(unsigned block, unsigned shared_bytes) {
    auto team = std::make_unique<Team>();
    team->block = block, team->alive = num_threads;
    team->memory = std::make_unique<char[]>(shared_bytes + 32);
    char* memory = team->memory.get();
    team->shared = memory + (16 - reinterpret_cast<uintptr_t>(memory) % 16) % 16;
    team->shared_end = team->shared + shared_bytes;
    std::memset(team->shared, 0xff, shared_bytes);
    check_shared(team->shared, shared_bytes);
    unsigned warps = (num_threads + WARP - 1) / WARP;
    team->meetings.resize(warps);
    team->warp_turns.assign(warps, 0);
    for (unsigned thread = 0; thread < num_threads; ++thread) {
        auto fiber = std::make_unique<Fiber>();
        fiber->team = team.get(), fiber->thread = thread, fiber->stack = new_stack();
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack;
        fiber->context.uc_stack.ss_size = STACK;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, entry, 0);
        ready.push_back(fiber.get());
        team->fibers.push_back(std::move(fiber));
    }
    return team;
}

void end(Team& team) {
    check_shared_ends(team.shared, team.shared_end - team.shared);
    for (auto& fiber : team.fibers) free_stacks.push_back(fiber->stack);
}

std::string who_waits(const std::vector<std::unique_ptr<Team>>& teams) {
    std::string found;
    unsigned told = 0;
    for (auto& team : teams)
        for (auto& fiber : team->fibers)
            if (!fiber->done && told++ < 4)
                found += "; lane " + std::to_string(fiber->thread) + " of block " + std::to_string(team->block) +
                         " at line " + std::to_string(fiber->line);
    return "lanes wait for one that does not come" + found;
}

uint64_t meet(uint32_t mask, uint64_t value, unsigned from, int line, bool orders) {
    unsigned id = me->thread % WARP, warp = me->thread / WARP;
    Meeting& meeting = me->team->meetings[warp];
    me->line = line;
    if (!(mask >> id & 1)) fail("a warp operation at line " + std::to_string(line) + " whose mask leaves out its own lane");
    if (meeting.arrived && meeting.line != line)
        fail("warp operations of one warp at lines " + std::to_string(line) + " and " + std::to_string(meeting.line));
    if (meeting.arrived && meeting.mask != mask)
        fail("a warp operation at line " + std::to_string(line) + " with different masks in one warp");
    if (!(mask >> from & 1))
        fail("a warp operation at line " + std::to_string(line) + " that asks a lane outside of its mask");
    meeting.mask = mask, meeting.line = line, meeting.orders = orders;
    meeting.arrived |= 1u << id;
    meeting.values[id] = value;
    meeting.waiting.push_back({me, from});
    if (meeting.arrived == mask) {
        for (auto& [fiber, asked] : meeting.waiting) {
            fiber->answer = meeting.values[asked];
            ready.push_back(fiber);
        }
        if (orders) ++me->team->warp_turns[warp];
        meeting.arrived = 0;
        meeting.waiting.clear();
    }
    Fiber* self = me;
    wait_here();
    return self->answer;
}
}  // namespace

const Running* running() { return me ? &now : nullptr; }

void fail(const std::string& what) {
    Fiber* self = me;
    error = what + ", in lane " + std::to_string(self->thread) + " of block " + std::to_string(self->team->block);
    me = nullptr;
    swapcontext(&self->context, &home);  // for good
    __builtin_unreachable();
}

struct Place { unsigned x, y, z; };
Place thread_index() { return {me->thread, 0, 0}; }
Place block_index() { return {me->team->block, 0, 0}; }
Place block_count() { return {num_blocks, 1, 1}; }
void* shared_memory() { return me->team->shared; }

int barrier_and(int vote, int line) {
    Team* team = me->team;
    me->line = line;
    if (!team->at_barrier.empty() && team->barrier_line != line)
        fail("barriers of one block at lines " + std::to_string(line) + " and " + std::to_string(team->barrier_line));
    if (team->alive != num_threads)
        fail("a barrier at line " + std::to_string(line) + " after a lane of the block has ended");
    team->barrier_line = line;
    team->votes &= vote;
    team->at_barrier.push_back(me);
    if (team->at_barrier.size() == team->alive) release_barrier(team);
    wait_here();
    return team->told;
}
void barrier(int line) { barrier_and(1, line); }
void meet_warp(uint32_t mask, int line) { meet(mask, 0, me->thread % WARP, line, true); }
unsigned long long exchange(uint32_t mask, unsigned long long value, unsigned from, int line) {
    return meet(mask, value, from, line, false);
}
}  // namespace host

// One launch. spans: the memory that the kernel may touch. moved: how much of it was read, and written. Returns 0, or 1 and what was wrong.
extern "C" int emulate(void* entry_of_lane, void** arguments, unsigned blocks, unsigned threads, unsigned shared_bytes,
                       uint64_t seed, unsigned resident, unsigned spans, const uint64_t* addresses,
                       const uint64_t* sizes, uint64_t* moved, char* told, unsigned told_bytes) {
    using namespace host;
    std::lock_guard<std::mutex> alone(one_at_a_time);
    kernel = reinterpret_cast<void (*)(void**)>(entry_of_lane), kernel_arguments = arguments;
    num_blocks = blocks, num_threads = threads, random_order = seed != 0;
    order.seed(seed);
    error.clear(), ready.clear();
    check_begins(spans, addresses, sizes);
    std::vector<unsigned> numbers(blocks);
    for (unsigned i = 0; i < blocks; ++i) numbers[i] = i;
    if (random_order) std::shuffle(numbers.begin(), numbers.end(), order);
    std::vector<std::unique_ptr<Team>> teams;
    unsigned started = 0;
    while (error.empty() && (started < blocks || !teams.empty())) {
        while (started < blocks && teams.size() < std::max(1u, resident))
            teams.push_back(start(numbers[started++], shared_bytes));
        if (ready.empty()) { error = who_waits(teams); break; }
        leave_to(&home);
        if (!error.empty()) break;
        auto ended = std::find_if(teams.begin(), teams.end(), [](auto& team) { return team->alive == 0; });
        if (ended != teams.end()) end(**ended), teams.erase(ended);
    }
    for (auto& team : teams) end(*team);
    check_ends(moved);
    me = nullptr;
    std::strncpy(told, error.c_str(), told_bytes - 1);
    return error.empty() ? 0 : 1;
}
