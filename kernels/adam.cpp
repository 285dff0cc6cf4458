// Adam and AdamW over lists of tensors: the CPU twin of kernels/adam, same bits. The arithmetic is described in rule.py.
#include "optimizer.h"

using namespace halfstep;

namespace {

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

struct AdamGroup : Group { double beta1, beta2, eps, decoupled; };
struct AdamHyper { float skip, gscale, decay, factor_m, factor_v, root, eps, step_size; };

// ALL_NEAR: both moving averages take the form of a beta above 0.5.
template <int OPTIONS> struct Adam {
    static constexpr bool AMSGRAD = OPTIONS & 1, L2 = OPTIONS & 2, ALL_NEAR = OPTIONS & 4;
    static constexpr int MOMENTS = AMSGRAD ? 3 : 2;
    static constexpr bool MAXIMUM = AMSGRAD;
    using Group = AdamGroup;
    using Hyper = AdamHyper;
    using Usual = Adam<OPTIONS | 4>;
    static Hyper numbers(const Group& g, int64_t count, double gscale) {
        const double decay = g.decoupled != 0.0 ? g.lr * g.decay : g.decay;
        const double root = 1.0 / std::sqrt(1.0 - power(g.beta2, count)), step_size = g.lr / (1.0 - power(g.beta1, count));
        return {0.0f, float(gscale), float(decay), factor(g.beta1), factor(g.beta2), float(root), float(g.eps),
                float(step_size)};
    }
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

}  // namespace

extern "C" void halfstep_adam(const Arguments* call) { step<Adam, true, 0, 1, 2, 3>(*call); }
