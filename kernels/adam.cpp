// Adam and AdamW over lists of tensors: the CPU twin of kernels/adam, same bits. The arithmetic is described in rule.py.
#include "optimizer.h"

using namespace halfstep;

namespace {

struct AdamGroup : Group { double beta1, beta2, eps, decoupled; };
struct AdamHyper { float skip, gscale, decay, factor_m, factor_v, root, eps, step_size; };

double power(double base, int64_t exponent) {
    double result = 1.0;
    for (int bit = 0; bit < 31; ++bit) {
        if ((exponent >> bit) & 1) result = result * base;
        base = base * base;
    }
    return result;
}

float factor(double beta) {
    const float weight = float(1.0 - beta);
    return weight < 0.5f ? weight : -float(beta);
}

AdamHyper numbers(const AdamGroup& g, int64_t count, double gscale) {
    return {0.0f, float(gscale), float(g.decoupled != 0.0 ? g.lr * g.decay : g.decay), factor(g.beta1), factor(g.beta2),
            float(1.0 / std::sqrt(1.0 - power(g.beta2, count))), float(g.eps), float(g.lr / (1.0 - power(g.beta1, count)))};
}

// ALL_NEAR: both moving averages take the form of a beta above 0.5.
template <bool AMSGRAD, bool L2, bool ALL_NEAR> struct Adam {
    using Hyper = AdamHyper;
    static constexpr int MOMENTS = AMSGRAD ? 3 : 2;
    static constexpr bool MAXIMUM = AMSGRAD, USUAL = ALL_NEAR;
    static bool fits(const Hyper& h) { return h.factor_m > 0.0f && h.factor_v > 0.0f; }

    V gscale, decay, factor_m, factor_v, root_factor, eps, step_size, largest;
    bool near_m, near_v;
    Adam(const Hyper& h, float most)
        : gscale(splat(h.gscale)), decay(splat(h.decay)), factor_m(splat(h.factor_m)), factor_v(splat(h.factor_v)),
          root_factor(splat(h.root)), eps(splat(h.eps)), step_size(splat(h.step_size)), largest(splat(most)),
          near_m(ALL_NEAR || h.factor_m > 0.0f), near_v(ALL_NEAR || h.factor_v > 0.0f) {}

    HALFSTEP_INLINE static V average(V before, V now, V factor, bool near) {
        return (near ? before : now) + factor * (now - before);
    }
    HALFSTEP_INLINE void average(V w, V g, V* m) const {
        g = g * gscale;
        if (L2) g = g + decay * w;
        m[0] = average(m[0], g, factor_m, near_m);
        m[1] = average(smaller(largest, m[1]), smaller(largest, g * g), factor_v, near_v);
    }
    HALFSTEP_INLINE V weight(V w, V, const V* m) const {
        V d = step_size * (m[0] / (root(m[1]) * root_factor + eps));
        if (!L2) d = d + (V)((I)(decay * w) & ((V)magnitude(w) != splat(INFINITY)));
        return w - d;
    }
};

template <bool AMSGRAD, bool L2>
void run_adam(const Layout& layout, const Table& table, const AdamHyper* hyper, int32_t threads) {
    run<Adam<AMSGRAD, L2, false>, Adam<AMSGRAD, L2, true>>(layout, table, hyper, threads);
}

}  // namespace

extern "C" void halfstep_adam(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              const int64_t* tensor_group, const double* groups, float* hyper,
                              const float* grad_scale, const float* found_inf, const double* sum_of_squares,
                              int32_t param, int32_t grad, int32_t state, int32_t master, int32_t stochastic,
                              int32_t amsgrad, int32_t l2, int32_t threads) {
    const Table table{rows, chunk_tensor, tensors, chunks};
    AdamHyper* filled = (AdamHyper*)hyper;
    prepare(table, tensor_group, (const AdamGroup*)groups, filled, grad_scale, found_inf, sum_of_squares, numbers);
    if (found_inf && *found_inf != 0.0f) return;
    constexpr decltype(&run_adam<false, false>) RUN[] = {run_adam<false, false>, run_adam<false, true>,
                                                         run_adam<true, false>, run_adam<true, true>};
    RUN[2 * bool(amsgrad) + bool(l2)](Layout{param, grad, state, master, stochastic}, table, filled, threads);
}
