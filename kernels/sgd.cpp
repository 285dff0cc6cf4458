// SGD over lists of tensors: the CPU twin of kernels/sgd, same bits. The arithmetic is described in rule.py.
#include "optimizer.h"

using namespace halfstep;

namespace {

template <int OPTIONS> struct Sgd {
    static constexpr bool MOMENTUM = OPTIONS & 1, NESTEROV = OPTIONS & 2, DECAYS = OPTIONS & 4;
    static constexpr int MOMENTS = MOMENTUM;
    static constexpr bool MAXIMUM = false;
    using Usual = Sgd;
    struct Group : halfstep::Group { double momentum, dampening; };
    struct Hyper { float skip, gscale, decay, lr, momentum, keep, add; };
    static Hyper numbers(const Group& g, int64_t count, double gscale) {
        const double keep = count == 1 ? 0.0 : g.momentum, add = count == 1 ? 1.0 : 1.0 - g.dampening;
        return {0.0f, float(gscale), float(g.decay), float(g.lr), float(g.momentum), float(keep), float(add)};
    }
    static bool fits(const Hyper&) { return true; }
    Hyper h;
    Sgd(const Hyper& hyper, float) : h(hyper) {}
    HALFSTEP_INLINE V gradient(V w, V g) const { return DECAYS ? g * h.gscale + h.decay * w : g * h.gscale; }
    HALFSTEP_INLINE void average(V w, V g, V* m) const {
        if (MOMENTUM) m[0] = h.keep * m[0] + h.add * gradient(w, g);
    }
    HALFSTEP_INLINE V weight(V w, V g, const V* m) const {
        if (NESTEROV) return w - h.lr * (gradient(w, g) + h.momentum * m[0]);
        return w - h.lr * (MOMENTUM ? m[0] : gradient(w, g));
    }
};

}  // namespace

extern "C" void halfstep_sgd(const Arguments* call) { step<Sgd, true, 0, 1, 3, 4, 5, 7>(*call); }
