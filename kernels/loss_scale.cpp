// Update the loss scale after a step, on the CPU, by the rules of kernels/loss_scale.py.
#include "native.h"

extern "C" void halfstep_loss_scale(float* scale, int32_t* clean_steps, int32_t* tolerance, float* skipped,
                                    int64_t* counts, const float* found_inf, double growth_factor,
                                    double backoff_factor, int32_t growth_interval, int32_t hysteresis,
                                    int32_t refill_on_clean, float least, float most) {
    const bool overflow = *found_inf != 0.0f;
    int32_t left = *tolerance, clean = overflow ? 0 : *clean_steps + 1;
    float value = *scale;
    if (overflow) {
        left = left > 1 ? left - 1 : 0;
        if (left == 0) value = static_cast<float>(value * backoff_factor);
        counts[2] = counts[0] + 1;
    } else if (refill_on_clean) {
        left = hysteresis;
    }
    if (clean == growth_interval) {
        value = static_cast<float>(value * growth_factor);
        clean = 0;
        left = hysteresis;
    }
    *scale = value < least ? least : value > most ? most : value;
    *clean_steps = clean;
    *tolerance = left;
    *skipped = overflow ? 1.0f : 0.0f;
    counts[0] += 1;
    counts[1] += overflow;
}
