// Attention of single rows over a long context, reading K and V where they lie. Knows slots; knows no tiles.
//
// A row's slots are cut into parts, so that one long context keeps every thread busy; parts are joined by their maxima
// (flash-decoding). The heads that share a K/V head are served together from one read of it.
#include "amx.h"
#include "row_products.h"

namespace shoal {
namespace {

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
  using Products = RowProducts<T, NW>;
  using Weight = typename Products::Weight;
  static constexpr long kLanes = Products::kLanes;

  const Attention<T>& call;
  Products products;

  // Scores become weights (zero beyond count); returns the factor for what was accumulated before.
  __attribute__((noinline)) float weigh(float* scores, long count, State& state, Weight* weights) const {
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

  // One chunk of keys of one K/V head, for H of the heads that share it.
  template <int H>
  void serve(const T* const* keys, long count, long offset, const T* q, float* scores, Weight* weights, State* states, float* sums) const {
    float factors[H];
    products.template scores<H>(keys, count, offset, q, scores);
    for (int h = 0; h < H; ++h) factors[h] = weigh(scores + h * kChunk, count, states[h], weights + h * kChunk);
    products.template gather<H>(keys, count, offset + call.kv_heads * call.head_stride(), weights, factors, sums);
  }

  // One part of one row, all heads.
  void run(const Part& part, State* states, float* sums) const {
    alignas(64) float scores[kHeadsAtOnce * kChunk];
    alignas(64) Weight weights[kHeadsAtOnce * kChunk];
    const T* keys[2][kChunk + 16];
    const Run& own = call.runs[part.run];
    const int32_t* ids = own.ids(call.layer);
    const Seen seen = seen_from(own, own.start_slot + part.row, call.window);
    const T* q = call.q + (own.first_row + part.row) * call.q_stride;
    const long group = call.group();
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
          const T* own_q = q + head * call.d;
          float* own_sums = sums + head * kLanes;
          if (some == 1) serve<1>(keys[turn], count, offset, own_q, scores, weights, states + head, own_sums);
          if (some == 2) serve<2>(keys[turn], count, offset, own_q, scores, weights, states + head, own_sums);
          if (some == 3) serve<3>(keys[turn], count, offset, own_q, scores, weights, states + head, own_sums);
          if (some == 4) serve<4>(keys[turn], count, offset, own_q, scores, weights, states + head, own_sums);
        }
      }
      count = next;
    }
  }

  // Divide by the sum and write a row's output in its own order.
  void finish(long row, const State* states, const float* sums) const {
    T* out = call.out + row * call.heads * call.d;
    for (long h = 0; h < call.heads; ++h) products.write(sums + h * kLanes, all(1.0f / states[h].sum), out + h * call.d);
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
  const Kernel<T, NW> kernel{call, {call, call.d / Words<T>::kPer}};
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
