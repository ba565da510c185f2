// The kernel language of CUDA for g++: as much of it as the project's kernels use. A lane is a fiber of one host thread;
// lanes change over at barriers and warp operations only, in an order of the emulator's choice (lanes.cpp). Compiled
// with -fsanitize=thread, so that the compiler calls a function of ours before each access to memory (checks.cpp).
//
// A source is included as it is, but for the memory that its lanes share: emulator.py turns `extern __shared__ float x[];`
// into `float* x = static_cast<float*>(::host::shared_memory());`. Behind it stands HOST_KERNEL(name) for each kernel.
#pragma once

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) ((void)0)
#define __isGlobal(pointer) true
#define UNSEEN __attribute__((no_sanitize("thread")))  // what is the emulator's own is no access of a kernel

typedef unsigned uint32;
typedef unsigned long long uint64;
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace host {
struct Place { unsigned x, y, z; };

// lanes.cpp. line: of the call, to tell lanes that meet in different places.
Place thread_index();
Place block_index();
Place block_count();
void* shared_memory();
void barrier(int line);
int barrier_and(int vote, int line);
uint64 exchange(uint32 mask, uint64 value, unsigned from, int line);  // the value of lane `from` of the warp
void meet_warp(uint32 mask, int line);

template <class To, class From> UNSEEN inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline unsigned lane() { return thread_index().x % 32; }
inline unsigned shuffle(uint32 mask, unsigned value, unsigned from, int line) {
    return (unsigned)exchange(mask, value, from > 31 ? lane() : from, line);
}
inline float shuffle(uint32 mask, float value, unsigned from, int line) {
    return as<float>(shuffle(mask, as<unsigned>(value), from, line));
}

template <class T> struct Type { using Value = T; };
template <class T> struct Type<const T> { using Value = T; };
template <unsigned... I> struct Numbers {};
template <unsigned N, unsigned... I> struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <unsigned... I> struct UpTo<0, I...> { using Is = Numbers<I...>; };
template <class... A, unsigned... I> UNSEEN void call(void (*kernel)(A...), void** arguments, Numbers<I...>) {
    kernel(*static_cast<typename Type<A>::Value*>(arguments[I])...);
}
template <class... A> UNSEEN void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, typename UpTo<sizeof...(A)>::Is{});
}
}  // namespace host

#define threadIdx (::host::thread_index())
#define blockIdx (::host::block_index())
#define gridDim (::host::block_count())
#define __syncthreads() ::host::barrier(__LINE__)
#define __syncthreads_and(vote) ::host::barrier_and((vote) != 0, __LINE__)
#define __syncwarp() ::host::meet_warp(0xffffffffu, __LINE__)
#define __shfl_down_sync(mask, value, by) ::host::shuffle(mask, value, ::host::lane() + (by), __LINE__)
#define __shfl_sync(mask, value, from) ::host::shuffle(mask, value, (from), __LINE__)

// Compiled with -ffp-contract=off: each is rounded for itself, as the device's are.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float __double2float_rn(double a) { return (float)a; }
inline unsigned __float_as_uint(float x) { return ::host::as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return ::host::as<float>(x); }

#define HOST_KERNEL(name)                                                                \
    static void lane_of_##name(void** arguments) { ::host::call(name, arguments); }      \
    extern "C" void* kernel_##name() { return reinterpret_cast<void*>(lane_of_##name); }
