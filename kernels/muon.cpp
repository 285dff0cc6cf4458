// Muon over lists of matrices: the CPU twin of kernels/muon, same bits. The arithmetic is described in rule.py.
#include "optimizer.h"

using namespace halfstep;

namespace {

struct Muon {
    static constexpr bool MAXIMUM = false;
    struct Group : halfstep::Group { double momentum, ratio; };
    struct Hyper { float skip, gscale, factor, rate, decay; };
    static Hyper numbers(const Group& g, int64_t, double gscale) {
        const float weight = float(1.0 - g.momentum), factor = weight < 0.5f ? weight : -float(g.momentum);
        return {0.0f, float(gscale), factor, float(g.lr * g.ratio), float(g.lr * g.decay)};
    }
    static bool fits(const Hyper&) { return true; }
    Hyper h;
    Muon(const Hyper& hyper, float) : h(hyper) {}
};

template <int OPTIONS> struct Momentum : Muon {
    static constexpr int MOMENTS = 1;
    using Usual = Momentum;
    using Muon::Muon;
    HALFSTEP_INLINE V moved(V before, V g) const {
        const V new_g = g * h.gscale;
        return (h.factor > 0.0f ? before : new_g) + h.factor * (new_g - before);
    }
    HALFSTEP_INLINE void average(V, V g, V* m) const { m[0] = moved(m[0], g); }
    HALFSTEP_INLINE V weight(V, V g, const V* m) const { return OPTIONS & 1 ? moved(m[0], g) : m[0]; }
};

template <int OPTIONS> struct Weight : Muon {
    static constexpr int MOMENTS = 0;
    using Usual = Weight;
    using Muon::Muon;
    HALFSTEP_INLINE void average(V, V, V*) const {}
    HALFSTEP_INLINE V weight(V w, V g, const V*) const { return w - (h.rate * g + h.decay * w); }
};

}  // namespace

extern "C" void halfstep_muon_momentum(const Arguments* call) { step<Momentum, true, 0, 1>(*call); }
extern "C" void halfstep_muon_weight(const Arguments* call) { step<Weight, false, 0>(*call); }
