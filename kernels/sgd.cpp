// SGD over lists of tensors: the CPU twin of kernels/sgd, same bits. The arithmetic is described in rule.py.
#include "optimizer.h"

using namespace halfstep;

namespace {

struct SgdGroup : Group { double momentum, dampening; };
struct SgdHyper { float skip, gscale, decay, lr, momentum, keep, add; };

SgdHyper numbers(const SgdGroup& g, int64_t count, double gscale) {
    const bool first = count == 1;
    return {0.0f, float(gscale), float(g.decay), float(g.lr), float(g.momentum), first ? 0.0f : float(g.momentum),
            first ? 1.0f : float(1.0 - g.dampening)};
}

template <bool MOMENTUM, bool NESTEROV, bool DECAYS> struct Sgd {
    using Hyper = SgdHyper;
    static constexpr int MOMENTS = MOMENTUM;
    static constexpr bool MAXIMUM = false, USUAL = false;
    static bool fits(const Hyper&) { return true; }

    V gscale, decay, lr, momentum, keep, add;
    Sgd(const Hyper& h, float)
        : gscale(splat(h.gscale)), decay(splat(h.decay)), lr(splat(h.lr)), momentum(splat(h.momentum)),
          keep(splat(h.keep)), add(splat(h.add)) {}

    HALFSTEP_INLINE V gradient(V w, V g) const {
        g = g * gscale;
        return DECAYS ? g + decay * w : g;
    }
    HALFSTEP_INLINE void average(V w, V g, V* m) const {
        if (MOMENTUM) m[0] = keep * m[0] + add * gradient(w, g);
    }
    HALFSTEP_INLINE V weight(V w, V g, const V* m) const {
        V d = MOMENTUM && !NESTEROV ? m[0] : gradient(w, g);
        if (NESTEROV) d = d + momentum * m[0];
        return w - lr * d;
    }
};

template <bool... OPTIONS> void run_sgd(const Layout& layout, const Table& table, const SgdHyper* hyper, int32_t threads) {
    run<Sgd<OPTIONS...>, Sgd<OPTIONS...>>(layout, table, hyper, threads);
}

}  // namespace

extern "C" void halfstep_sgd(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                             const int64_t* tensor_group, const double* groups, float* hyper,
                             const float* grad_scale, const float* found_inf, const double* sum_of_squares,
                             int32_t param, int32_t grad, int32_t state, int32_t master, int32_t stochastic,
                             int32_t momentum, int32_t nesterov, int32_t decays, int32_t threads) {
    const Table table{rows, chunk_tensor, tensors, chunks};
    SgdHyper* filled = (SgdHyper*)hyper;
    prepare(table, tensor_group, (const SgdGroup*)groups, filled, grad_scale, found_inf, sum_of_squares, numbers);
    if (found_inf && *found_inf != 0.0f) return;
    const Layout layout{param, grad, state, master, stochastic};
    constexpr decltype(&run_sgd<false, false, false>) RUN[] = {
        run_sgd<false, false, false>, run_sgd<false, false, true>, run_sgd<true, false, false>,
        run_sgd<true, false, true>,   run_sgd<true, true, false>,  run_sgd<true, true, true>};
    RUN[2 * (bool(momentum) + bool(momentum && nesterov)) + bool(decays)](layout, table, filled, threads);
}
