// Loops over registers must be unrolled: GCC at -O2 keeps an array of vectors in memory when the loop over it stays
// one.
#ifndef ATTND_KERNELS_UNROLL_H_
#define ATTND_KERNELS_UNROLL_H_

#if defined(__clang__)
#define ATTND_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ATTND_UNROLL _Pragma("GCC unroll 16")
#endif

#endif  // ATTND_KERNELS_UNROLL_H_
