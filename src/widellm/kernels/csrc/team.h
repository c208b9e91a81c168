// Threads of one call, and its scratch memory. OpenMP is the one that torch has loaded (same library name), so a call
// uses torch's idle threads instead of fighting with them.
#pragma once
#include <sched.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

// Threads meet here. OpenMP's own barrier spins for milliseconds before it sleeps, which is ruinous when another
// program has one of the cores; this one gives its core away after some microseconds.
struct Meeting {
  alignas(64) int64_t arrived = 0;
  alignas(64) int64_t round = 0;
};

struct Team {
  int64_t thread, threads;
  Meeting *meeting;

  void barrier() const {
    if (threads == 1) return;
    int64_t round = __atomic_load_n(&meeting->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
      __atomic_store_n(&meeting->arrived, (int64_t)0, __ATOMIC_RELAXED);
      __atomic_store_n(&meeting->round, round + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&meeting->round, __ATOMIC_ACQUIRE) == round; spins++) {
      if (spins < 2000) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }
};

template <class Body> static void parallel(int64_t threads, const Body &body) {
  Meeting meeting;
  if (threads <= 1) return body(Team{0, 1, &meeting});  // keeps OpenMP's pool as torch left it
#if defined(_OPENMP)
#pragma omp parallel num_threads((int)threads)
  body(Team{(int64_t)omp_get_thread_num(), (int64_t)omp_get_num_threads(), &meeting});
#else
  body(Team{0, 1, &meeting});
#endif
}

struct Range { int64_t begin, end; };

static inline Range share(int64_t total, int64_t unit, const Team &team) {  // whole units, in order
  int64_t units = ceil_div(total, unit), t = team.thread;
  return {imin(units * t / team.threads * unit, total), imin(units * (t + 1) / team.threads * unit, total)};
}

// A counter that hands out work: results never depend on who takes which unit.
struct Queue {
  int64_t next;
  int64_t take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

struct Scratch {
  WideArena *arena;
  bool ok = true;
  template <class T> T *get(int64_t count) {
    T *p = static_cast<T *>(widellm_arena_get(arena, (size_t)imax(count, 1) * sizeof(T)));
    if (!p) ok = false;
    return p;
  }
  template <class T> T *zeros(int64_t count) {
    T *p = get<T>(count);
    if (p) memset(static_cast<void *>(p), 0, (size_t)count * sizeof(T));
    return p;
  }
};

}  // namespace
