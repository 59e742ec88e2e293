// Attention of single rows over a long context, reading K and V where they lie. Knows slots; knows no tiles.
//
// A row's slots are cut into parts, so that one long context keeps every thread busy; parts are joined by their maxima
// (flash-decoding). The heads that share a K/V head are served together from one read of it.
#include "amx.h"
#include "paged.h"

namespace shoal {
namespace {

constexpr long kChunk = 128;  // slots whose scores are held at once
constexpr int kHeadsAtOnce = 4;

struct Part {
  long run, row, first, last;  // of the row's seen slots
  long state;                  // index of its state, −1: writes the output itself
};

// Running softmax of one head: best score, sum, and the weighted sum of V in the order the kernel finds handy.
struct State {
  float best, sum;
};

template <class T, int NW>
struct Kernel {
  static constexpr long kLanes = NW * 16 * Words<T>::kPer;  // numbers per head in the accumulator

  const Attention<T>& call;
  long words;  // of one head

  void scores(const T* const* keys, long count, long offset, const T* q, float* out) const {
    Ints query[NW];
    Lanes mask[NW];
    for (int w = 0; w < NW; ++w) {
      mask[w] = lanes(words - 16 * w);
      query[w] = load_words(reinterpret_cast<const uint32_t*>(q) + 16 * w, mask[w]);
    }
    for (long base = 0; base < count; base += 16) {
      Floats dots[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const uint32_t* key = reinterpret_cast<const uint32_t*>(keys[base + i] + offset);
        dots[i] = Words<T>::dot(zeros(), load_words(key, mask[0]), query[0]);
#pragma GCC unroll 16
        for (int w = 1; w < NW; ++w) {
          dots[i] = Words<T>::dot(dots[i], load_words(key + 16 * w, mask[w]), query[w]);
        }
      }
      Floats sum = sum_each(dots) * all(call.scale);
      if (call.cap > 0) sum = soft_cap<T>(sum, call.cap, 2 * 1.44269504f / call.cap);
      store16(out + base, select(lanes(count - base), sum, all(kNever)));
    }
  }

  // Scores become weights (in T, zero beyond count); returns the factor for what was accumulated before.
  float weigh(float* scores, long count, State& state, T* weights) const {
    Floats best = load16(scores);
    for (long i = 16; i < count; i += 16) best = maximum(best, load16(scores + i));
    const float top = std::max(state.best, max_all(best));
    Floats sum = zeros();
    for (long i = 0; i < count; i += 16) {
      const Floats p = exp2<T>(load16(scores + i) - all(top));
      sum = sum + p;
      store(weights + i, p, 16);
    }
    const float factor = __builtin_exp2f(state.best - top);
    state.best = top;
    state.sum = state.sum * factor + sum_all(sum);
    return factor;
  }

  // Ask for one of kv_heads shares of the next chunk, in the order of memory. Processors with a tile unit take prefetches; of
  // the others at least Zen 4 ran ahead only behind plain loads, whose values are not used.
  void fetch(const T* const* keys, long count, long share) const {
    const long planes = 2 * call.kv_heads, lines = 64 / (long)sizeof(T);
    long num_pieces = 0, starts[kChunk + 1];
    for (long i = 0; i < count; ++i) {
      if (i == 0 || keys[i] != keys[i - 1] + call.d) starts[num_pieces++] = i;
    }
    starts[num_pieces] = count;
    const long total = num_pieces * planes;
    for (long p = share * total / call.kv_heads; p < (share + 1) * total / call.kv_heads; ++p) {
      const long piece = p / planes, length = (starts[piece + 1] - starts[piece]) * call.d;
      const T* from = keys[starts[piece]] + p % planes * call.head_stride();
      if (use_amx) {
        for (long at = 0; at < length; at += lines) _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T1);
      } else {
        for (long at = 0; at < length; at += lines) (void)*reinterpret_cast<const volatile char*>(from + at);
      }
    }
  }

  template <int H>
  void gather(const T* const* keys, long count, long offset, const T* weights, const float* factors, float* sums) const {
    for (int w = 0; w < NW; ++w) {
      const Lanes mask = lanes(words - 16 * w);
      if constexpr (sizeof(T) == 2) {
        Floats low[H], high[H];
        for (int h = 0; h < H; ++h) {
          low[h] = load16(sums + h * kLanes + 32 * w) * all(factors[h]);
          high[h] = load16(sums + h * kLanes + 32 * w + 16) * all(factors[h]);
        }
        for (long i = 0; i < count; i += 2) {  // an odd count: the last key comes twice, the second time with weight 0
          const Ints a = load_words(reinterpret_cast<const uint32_t*>(keys[i] + offset) + 16 * w, mask);
          const Ints b = load_words(reinterpret_cast<const uint32_t*>(keys[i + 1] + offset) + 16 * w, mask);
          const Ints first = pairs_of_first_words(a, b), second = pairs_of_last_words(a, b);
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) {
            uint32_t pair;
            std::memcpy(&pair, weights + h * kChunk + i, 4);
            const Ints p = all_words(pair);
            low[h] = Words<T>::dot(low[h], first, p);
            high[h] = Words<T>::dot(high[h], second, p);
          }
        }
        for (int h = 0; h < H; ++h) {
          store16(sums + h * kLanes + 32 * w, low[h]);
          store16(sums + h * kLanes + 32 * w + 16, high[h]);
        }
      } else {
        Floats sum[H];
        for (int h = 0; h < H; ++h) {
          sum[h] = load16(sums + h * kLanes + 16 * w) * all(factors[h]);
        }
        for (long i = 0; i < count; ++i) {
          const Floats v = as_floats(load_words(reinterpret_cast<const uint32_t*>(keys[i] + offset) + 16 * w, mask));
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) {
            sum[h] = multiply_add(v, all(weights[h * kChunk + i]), sum[h]);
          }
        }
        for (int h = 0; h < H; ++h) store16(sums + h * kLanes + 16 * w, sum[h]);
      }
    }
  }

  // One part of one row, all heads.
  void run(const Part& part, State* states, float* sums) const {
    alignas(64) float scores_of[kChunk];
    alignas(64) T weights[kHeadsAtOnce * kChunk];
    const T* keys[2][kChunk + 16];
    const Run& own = call.runs[part.run];
    const int32_t* ids = own.ids(call.layer);
    const Seen seen = seen_from(own, own.start_slot + part.row, call.window);
    const T* q = call.q + (own.first_row + part.row) * call.q_stride;
    const long group = call.group(), value = call.kv_heads * call.head_stride();
    for (long h = 0; h < call.heads; ++h) states[h] = {kNever, 0.0f};
    std::memset(sums, 0, sizeof(float) * call.heads * kLanes);
    auto find = [&](long first, const T** found) {  // pointers, padded by the last one: nothing unseen is ever read
      const long count = std::min(kChunk, part.last - first);
      for (long i = 0; i < count; ++i) {
        found[i] = call.key(ids, seen.slot(first + i));
      }
      for (long i = count; count > 0 && i < (count + 15) / 16 * 16; ++i) found[i] = found[count - 1];
      return count;
    };
    long count = find(part.first, keys[0]);
    for (long at = part.first, turn = 0; count > 0; at += kChunk, turn ^= 1) {
      const long next = find(std::min(at + kChunk, part.last), keys[turn ^ 1]);
      for (long kv = 0; kv < call.kv_heads; ++kv) {
        const long offset = kv * call.head_stride();
        fetch(keys[turn ^ 1], next, kv);
        for (long done = 0; done < group; done += kHeadsAtOnce) {
          const long some = std::min((long)kHeadsAtOnce, group - done), head = kv * group + done;
          float factors[kHeadsAtOnce];
          for (long h = 0; h < some; ++h) {
            scores(keys[turn], count, offset, q + (head + h) * call.d, scores_of);
            factors[h] = weigh(scores_of, count, states[head + h], weights + h * kChunk);
          }
          float* own_sums = sums + head * kLanes;
          if (some == 1) gather<1>(keys[turn], count, value + offset, weights, factors, own_sums);
          if (some == 2) gather<2>(keys[turn], count, value + offset, weights, factors, own_sums);
          if (some == 3) gather<3>(keys[turn], count, value + offset, weights, factors, own_sums);
          if (some == 4) gather<4>(keys[turn], count, value + offset, weights, factors, own_sums);
        }
      }
      count = next;
    }
  }

  // Divide by the sum and write a row's output in its own order.
  void finish(long row, const State* states, const float* sums) const {
    T* out = call.out + row * call.heads * call.d;
    for (long h = 0; h < call.heads; ++h) {
      const Floats by = all(1.0f / states[h].sum);
      for (int w = 0; w < NW; ++w) {
        const float* own = sums + h * kLanes + w * 16 * Words<T>::kPer;
        T* to = out + h * call.d + w * 16 * Words<T>::kPer;
        const long left = call.d - w * 16 * Words<T>::kPer;
        if constexpr (sizeof(T) == 2) {
          const Floats low = load16(own), high = load16(own + 16);  // four of eight numbers of each lane
          store(to, first_numbers(low, high) * by, left);
          if (left > 16) store(to + 16, last_numbers(low, high) * by, left - 16);
        } else {
          store(to, load16(own) * by, left);
        }
      }
    }
  }
};

std::vector<Part> cut(const Run* runs, const std::vector<long>& which, long window, int num_threads, long& num_states) {
  long total = 0;
  for (long run : which) {
    for (long row = 0; row < runs[run].num_rows; ++row) total += seen_from(runs[run], runs[run].start_slot + row, window).count();
  }
  const long most = num_threads == 1 ? total : std::max(2 * kChunk, (total / (4L * num_threads) + kChunk - 1) / kChunk * kChunk);
  std::vector<Part> parts;
  num_states = 0;
  for (long run : which) {
    for (long row = 0; row < runs[run].num_rows; ++row) {
      const long count = seen_from(runs[run], runs[run].start_slot + row, window).count();
      const bool whole = count <= most + most / 4;
      const long step = whole ? count : most;
      for (long first = 0; first < count; first += step) {
        parts.push_back({run, row, first, std::min(first + step, count), whole ? -1 : num_states++});
      }
    }
  }
  return parts;
}

template <class T, int NW>
void attend_rows(const Attention<T>& call, const std::vector<long>& which) {
  static thread_local Scratch<float> shared, own_sums;
  static thread_local Scratch<State> shared_states, own_states;
  const Kernel<T, NW> kernel{call, call.d / Words<T>::kPer};
  const long per_state = call.heads * kernel.kLanes;
  long num_states = 0;
  const std::vector<Part> parts = cut(call.runs, which, call.window, call.num_threads, num_states);
  float* partial = shared.at_least(num_states * per_state + 1);
  State* states = shared_states.at_least(num_states * call.heads + 1);
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.num_threads) if (parts.size() > 1)
  for (size_t i = 0; i < parts.size(); ++i) {
    const FlushScope flush;
    const Part& part = parts[i];
    if (part.state >= 0) {
      kernel.run(part, states + part.state * call.heads, partial + part.state * per_state);
    } else {
      State* mine = own_states.at_least(call.heads);
      float* sums = own_sums.at_least(per_state);
      kernel.run(part, mine, sums);
      kernel.finish(call.runs[part.run].first_row + part.row, mine, sums);
    }
  }
  const FlushScope flush;
  for (size_t i = 0; i < parts.size();) {  // join the parts of one row into its first
    size_t end = i + 1;
    while (end < parts.size() && parts[end].run == parts[i].run && parts[end].row == parts[i].row) ++end;
    if (parts[i].state >= 0) {
      State* to = states + parts[i].state * call.heads;
      float* sums = partial + parts[i].state * per_state;
      for (size_t j = i + 1; j < end; ++j) {
        const State* from = states + parts[j].state * call.heads;
        const float* more = partial + parts[j].state * per_state;
        for (long h = 0; h < call.heads; ++h) {
          const float top = std::max(to[h].best, from[h].best);
          const float mine = __builtin_exp2f(to[h].best - top), theirs = __builtin_exp2f(from[h].best - top);
          for (long k = h * kernel.kLanes; k < (h + 1) * kernel.kLanes; ++k) sums[k] = sums[k] * mine + more[k] * theirs;
          to[h] = {top, to[h].sum * mine + from[h].sum * theirs};
        }
      }
      kernel.finish(call.runs[parts[i].run].first_row + parts[i].row, to, sums);
    }
    i = end;
  }
}

}  // namespace

template <class T>
void attend_few_rows(const Attention<T>& call, const std::vector<long>& runs) {
  switch ((call.d / Words<T>::kPer + 15) / 16) {
    case 1:
      return attend_rows<T, 1>(call, runs);
    case 2:
      return attend_rows<T, 2>(call, runs);
    case 3:
      return attend_rows<T, 3>(call, runs);
    case 4:
      return attend_rows<T, 4>(call, runs);
    case 5:
      return attend_rows<T, 5>(call, runs);
    case 6:
      return attend_rows<T, 6>(call, runs);
    case 7:
      return attend_rows<T, 7>(call, runs);
    case 8:
      return attend_rows<T, 8>(call, runs);
    case 9:  // from here on float alone: 16 words in a register's lanes, what lies beyond d masked
    case 10:
    case 11:
    case 12:
      return attend_rows<T, 12>(call, runs);
    default:
      return attend_rows<T, 16>(call, runs);
  }
}

template void attend_few_rows<float>(const Attention<float>&, const std::vector<long>&);
template void attend_few_rows<bf16>(const Attention<bf16>&, const std::vector<long>&);

}  // namespace shoal
