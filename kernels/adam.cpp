// Adam and AdamW over lists of tensors: the CPU twin of kernels/adam.py, same bits. The arithmetic is described there.
#include "native.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 2048;  // elements per table chunk
constexpr int64_t BLOCK = 256;   // elements converted and updated at a time: all local arrays fit the first-level cache
constexpr float MAX = 3.4028234663852886e38f;

enum Master : int32_t { NO_MASTER = 0, FULL_MASTER = 1, SPLIT_MASTER = 2 };
enum Operand { GRAD, PARAM, EXTRA, M, V, TOP, STEP, STREAM, BASE, INNER, INNER_WHOLE, SEED };
enum { GROUP_COLUMNS = 8, HYPER_COLUMNS = 10 };

struct Hyper { float gscale, decay, w1, w2, root, eps, step_size, skip, beta1, beta2; };
static_assert(sizeof(Hyper) == HYPER_COLUMNS * sizeof(float), "columns of the hyper table");

double power(double base, int64_t exponent) {
    double result = 1.0;
    for (int bit = 0; bit < 31; ++bit) {
        if ((exponent >> bit) & 1) result = result * base;
        base = base * base;
    }
    return result;
}

struct Group { double lr, beta1, beta2, eps, decay, maximize, decoupled, max_norm; };
static_assert(sizeof(Group) == GROUP_COLUMNS * sizeof(double), "columns of the group table");

// A step count as a number that powers and random bits can use.
int64_t whole(float step) { return int64_t(step < 1.0f ? 1.0f : (step > 0x1p30f ? 0x1p30f : step)); }

// Advance the step counts and fill the hyper table.
void prepare(const int64_t* rows, int64_t tensors, const int64_t* tensor_group, const Group* groups, Hyper* hyper,
             const float* grad_scale, const float* found_inf, const double* sum_of_squares) {
    const float skip = found_inf && *found_inf != 0.0f ? 1.0f : 0.0f;
    const double unscale = grad_scale ? 1.0 / double(*grad_scale) : 1.0;
    const double norm = sum_of_squares ? std::sqrt(*sum_of_squares) + 1e-6 : 0.0;
    int64_t last_group = -1, last_count = -1;
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
        float* step = (float*)rows[(2 + STEP) * tensors + tensor];
        *step = *step + (1.0f - skip);
        const int64_t count = whole(*step), group = tensor_group[tensor];
        Hyper& h = hyper[tensor];
        if (group == last_group && count == last_count) {  // most tensors share both: the powers are not computed again
            h = hyper[tensor - 1];
            continue;
        }
        const Group& g = groups[group];
        double scale = unscale;
        if (sum_of_squares) {
            const double clip = g.max_norm / norm;
            scale = scale * (clip > 1.0 ? 1.0 : clip);
        }
        h.gscale = float(g.maximize != 0.0 ? -scale : scale);
        h.decay = float(g.decoupled != 0.0 ? g.lr * g.decay : g.decay);
        h.w1 = float(1.0 - g.beta1);
        h.w2 = float(1.0 - g.beta2);
        h.root = float(1.0 / std::sqrt(1.0 - power(g.beta2, count)));
        h.eps = float(g.eps);
        h.step_size = float(g.lr / (1.0 - power(g.beta1, count)));
        h.skip = skip;
        h.beta1 = float(g.beta1);
        h.beta2 = float(g.beta2);
        last_group = group;
        last_count = count;
    }
}

inline float average(float old_value, float new_value, float weight, float beta, bool near_old) {
    return near_old ? old_value + weight * (new_value - old_value) : new_value + beta * (old_value - new_value);
}

// fp32 rounded stochastically to a number of format F, still in fp32.
template <typename F> inline float roughened(float x, uint32_t word);
template <> inline float roughened<BFloat16>(float x, uint32_t word) {
    return widen(bf16{uint16_t(round_to<BFloat16, STOCHASTIC, false>(x, word))});
}
template <> inline float roughened<Float16>(float x, uint32_t word) {
    return widen(f16{uint16_t(round_to<Float16, STOCHASTIC, false>(x, word))});
}
template <typename F> void roughen(float* __restrict x, const uint32_t* __restrict words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = roughened<F>(x[i], words[i]);
}

// The random words of elements start to start + n of a tensor, of which the whole parameter may hold more.
void random_words_of(const int64_t* table, int64_t tensors, int64_t start, int64_t n, uint32_t* words) {
    auto at = [&](Operand row) { return table[row * tensors]; };
    const uint32_t step = uint32_t(whole(*(const float*)at(STEP)));
    for (int64_t done = 0; done < n;) {
        const int64_t row = (start + done) / at(INNER), column = (start + done) % at(INNER);
        const int64_t run = at(INNER) - column < n - done ? at(INNER) - column : n - done;
        random_words<BLOCK>(uint64_t(at(SEED)), step, uint32_t(at(STREAM)), at(BASE) + row * at(INNER_WHOLE) + column,
                            run, words + done);
        done += run;
    }
}

// The update of up to BLOCK elements in local fp32 arrays. NOISY: the moments are bf16, rounded stochastically here.
template <bool AMSGRAD, bool L2, bool NOISY>
void update(const Hyper& h, int64_t n, const float* __restrict g_, float* __restrict w_, float* __restrict m_,
            float* __restrict v_, float* __restrict top_, const uint32_t* __restrict words) {
    const bool near_m = h.w1 < 0.5f, near_v = h.w2 < 0.5f;
    const float gscale = h.gscale, decay = h.decay, w1 = h.w1, w2 = h.w2, root = h.root, eps = h.eps;
    const float step_size = h.step_size, beta1 = h.beta1, beta2 = h.beta2;
    for (int64_t i = 0; i < n; ++i) {
        const float w = w_[i];
        float g = g_[i] * gscale;
        if (L2) g = g + decay * w;
        const float m = average(m_[i], g, w1, beta1, near_m);
        float square = g * g;
        square = square > MAX ? MAX : square;
        float v = v_[i];
        v = v > MAX ? MAX : v;
        v = average(v, square, w2, beta2, near_v);
        m_[i] = NOISY ? roughened<BFloat16>(m, words[i] << 16) : m;
        v_[i] = NOISY ? roughened<BFloat16>(v, words[i] ^ (words[i] << 16)) : v;
        if (AMSGRAD) {
            if (NOISY) v = v_[i];
            v = (v > top_[i]) | (v != v) ? v : top_[i];
            top_[i] = v;
        }
        float d = step_size * (m / (std::sqrt(v) * root + eps));
        if (!L2) {
            const float decayed = decay * w;
            d = d + ((bits_of(w) & 0x7fffffffu) == 0x7f800000u ? 0.0f : decayed);
        }
        w_[i] = w - d;
    }
}

inline void join(const bf16* weight, const int16_t* remainder, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t high = uint32_t(weight[i].bits) << 16, b = high + uint32_t(int32_t(remainder[i]));
        to[i] = from_bits((b & 0x7fffffffu) > 0x7f800000u ? high : b);
    }
}

inline void split(const float* from, bf16* weight, int16_t* remainder, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(from[i]);
        const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
        const uint32_t high = nan ? (b >> 16) | 0x7fc0u : (b + 0x8000u) >> 16;
        weight[i].bits = uint16_t(high);
        remainder[i] = int16_t(uint16_t(nan ? 0u : b - (high << 16)));
    }
}

// Conversions chosen once per call: a block amortises the indirect call, and every dtype is compiled once.
using Load = void (*)(const void*, float*, int64_t);
using Store = void (*)(const float*, void*, int64_t);
template <typename T> void load_block(const void* from, float* to, int64_t n) { load((const T*)from, to, n); }
template <typename T> void store_block(const float* from, void* to, int64_t n) { store(from, (T*)to, n); }
constexpr Load LOAD[] = {load_block<float>, load_block<f16>, load_block<bf16>};
constexpr Store STORE[] = {store_block<float>, store_block<f16>, store_block<bf16>};
constexpr int64_t SIZE[] = {4, 2, 2};

struct Layout { int32_t param, grad, state, master, stochastic; };

template <bool AMSGRAD, bool L2, bool NOISY>
void chunk_step(const Layout& layout, const int64_t* table, int64_t tensors, int64_t start, int64_t count,
                const Hyper& hyper) {
    alignas(64) float g[BLOCK], w[BLOCK], m[BLOCK], v[BLOCK], top[BLOCK];
    alignas(64) uint32_t words[BLOCK];
    for (int64_t done = start; done < start + count; done += BLOCK) {
        const int64_t n = start + count - done < BLOCK ? start + count - done : BLOCK;
        auto at = [&](Operand operand, int64_t size) { return (char*)table[operand * tensors] + done * size; };
        const int64_t state_size = SIZE[layout.state];
        char *param = at(PARAM, SIZE[layout.param]), *first = at(M, state_size), *second = at(V, state_size);
        LOAD[layout.grad](at(GRAD, SIZE[layout.grad]), g, n);
        LOAD[layout.state](first, m, n);
        LOAD[layout.state](second, v, n);
        if (AMSGRAD) LOAD[layout.state](at(TOP, state_size), top, n);
        if (layout.master == SPLIT_MASTER) join((const bf16*)param, (const int16_t*)at(EXTRA, 2), w, n);
        else if (layout.master == FULL_MASTER) load((const float*)at(EXTRA, 4), w, n);
        else LOAD[layout.param](param, w, n);
        if (layout.stochastic) random_words_of(table, tensors, done, n, words);
        update<AMSGRAD, L2, NOISY>(hyper, n, g, w, m, v, top, words);
        STORE[layout.state](m, first, n);
        STORE[layout.state](v, second, n);
        if (AMSGRAD) STORE[layout.state](top, at(TOP, state_size), n);
        if (layout.master == SPLIT_MASTER) {
            split(w, (bf16*)param, (int16_t*)at(EXTRA, 2), n);
        } else {
            if (layout.master == FULL_MASTER) store(w, (float*)at(EXTRA, 4), n);
            else if (layout.stochastic && layout.param == F16) roughen<Float16>(w, words, n);
            else if (layout.stochastic && layout.param == BF16) roughen<BFloat16>(w, words, n);
            STORE[layout.param](w, param, n);
        }
    }
}

template <bool AMSGRAD, bool L2, bool NOISY>
void run(const Layout& layout, const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
         const Hyper* hyper, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t tensor = chunk_tensor[chunk];
        const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
        const int64_t left = rows[tensor] - start;
        chunk_step<AMSGRAD, L2, NOISY>(layout, rows + 2 * tensors + tensor, tensors, start,
                                       left < CHUNK ? left : CHUNK, hyper[tensor]);
    }
}

}  // namespace

extern "C" void halfstep_adam(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              const int64_t* tensor_group, const double* groups, float* hyper,
                              const float* grad_scale, const float* found_inf, const double* sum_of_squares,
                              int32_t param, int32_t grad, int32_t state, int32_t master, int32_t amsgrad, int32_t l2,
                              int32_t stochastic, int32_t threads) {
    Hyper* table = (Hyper*)hyper;
    prepare(rows, tensors, tensor_group, (const Group*)groups, table, grad_scale, found_inf, sum_of_squares);
    if (found_inf && *found_inf != 0.0f) return;
    constexpr decltype(&run<false, false, false>) RUN[] = {
        run<false, false, false>, run<false, false, true>, run<false, true, false>, run<false, true, true>,
        run<true, false, false>,  run<true, false, true>,  run<true, true, false>,  run<true, true, true>};
    const bool noisy = stochastic && state == BF16;
    RUN[4 * bool(amsgrad) + 2 * bool(l2) + noisy](Layout{param, grad, state, master, stochastic}, rows, chunk_tensor,
                                                  tensors, chunks, table, threads);
}
