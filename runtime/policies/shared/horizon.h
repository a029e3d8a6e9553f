/* horizon.h: the eviction policy `horizon` of moectl for other engines, in one C99 header.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It tells which cached expert of a Mixture-of-Experts model is expected to be needed again last,
 * learnt from the ids that the routers select. Integers only: the same decisions on every machine,
 * and those of moectl's Python policy. Steps allocate nothing. Why: docs/lab/policies.md.
 *
 *     horizon h; size_t size = horizon_init(&h, NULL, layers, experts, top_k);
 *     horizon_init(&h, malloc(size), layers, experts, top_k);
 *     for each pass (forward call):
 *         horizon_begin(&h, num_tokens, is_decode);
 *         for each MoE layer, when its router has selected ids [num_tokens][top_k]:
 *             horizon_used(&h, layer, step++, ids, num_tokens);
 *             to make room: keys[horizon_victim(&h, keys, num_keys)] goes
 *
 * A key is layer * experts + expert. Offer keys that are resident and not needed by this step.
 * Steps count the layers run, over all passes. Ids below 0 are left out. Tokens of a pass that
 * decodes are of different requests. Right shifts of negative numbers must be arithmetic. */
#ifndef MOECTL_HORIZON_H
#define MOECTL_HORIZON_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    HZ_MEMORY = 1024, HZ_LAGS = 4, /* tokens remembered (31 bits hold no more), and that follow */
    HZ_RUNNING = 5, HZ_FEATURES = 8, /* frequencies, and 1 with the roots of them and 2 recalls */
    HZ_GRAIN = 16, /* expected steps are rounded to one in so many */
    HZ_SURE = 1 << 30, HZ_ONE = 1 << 24, HZ_ALIKE = 1 << 20, /* units of shares; waits; likeness */
    HZ_LATER = 14260634,   /* .85: weight of a pass of waiting against the one before it */
    HZ_LONGEST = 111848107 /* 1 / (1 - .85) passes: the wait for what is never used again */
};
typedef struct {
    size_t layers, experts, top_k, newest, tokens; /* slot of the newest; tokens remembered */
    int is_prompt, is_decode;
    int64_t seen, gains[HZ_RUNNING], weights[HZ_FEATURES];
    int64_t moments[HZ_FEATURES][HZ_FEATURES], products[HZ_FEATURES];
    int64_t *share;    /* [E] of the step's tokens that used each expert */
    int64_t *expected; /* [L, E] the step of the next use, in sixteenths */
    int64_t *levels, *known, *before; /* [L, F - 1, E]; [L, F, E] features, and a pass ago */
    int32_t *like;     /* [2, C] weight of a token by how many experts fewer it has in common */
    int32_t *alike, *counts; /* [N + LAGS] by age; [N] by slot */
    int16_t *common;   /* [L + 1, N] by age: experts in common with the newest, and in all */
    uint8_t *used;     /* [L, E] 1: this pass used it */
    uint8_t *memory;   /* [L, E, N] 1: the token of this slot used it; newer before older */
} horizon;

/* exp(-exponent) in 1 / ALIKE; the exponent in 1 / SURE. */
static int32_t horizon_faded(int64_t exponent) {
    int64_t halvings = exponent / 744261118, rest = exponent % 744261118; /* ln 2 */
    int64_t found = HZ_SURE, term = HZ_SURE;
    for (int place = 1; place < 12; place++) {
        term = ((term * rest) >> 30) / place;
        found += place % 2 ? -term : term;
    }
    return (int32_t)(found >> (halvings < 52 ? 10 + halvings : 62));
}

/* Begin without history, in `block`, aligned for int64_t. Return its size in bytes; if it is NULL,
 * do nothing else. */
static size_t horizon_init(horizon *h, void *block, int layers, int experts, int top_k) {
    static const int32_t guess[HZ_FEATURES] = /* in 1 / ONE: 5, 0, -.2, -.8, 0, 0, -2, -1 */
        {83886080, 0, -3355443, -13421773, 0, 0, -33554432, -16777216};
    size_t keys = (size_t)layers * (size_t)experts, most = (size_t)top_k * ((size_t)layers + 1);
    size_t longs = (size_t)experts + keys * 3 * HZ_FEATURES;
    size_t ints = 2 * (most + 1) + 2 * HZ_MEMORY + HZ_LAGS;
    size_t shorts = ((size_t)layers + 1) * HZ_MEMORY, bytes = keys * (1 + HZ_MEMORY);
    size_t size = 8 * longs + 4 * ints + 2 * shorts + bytes;
    if (!block) return size;
    memset(h, 0, sizeof *h), memset(block, 0, size);
    h->layers = (size_t)layers, h->experts = (size_t)experts, h->top_k = (size_t)top_k;
    h->share = (int64_t *)block, h->expected = h->share + experts;
    h->levels = h->expected + keys, h->known = h->levels + (HZ_FEATURES - 1) * keys;
    h->before = h->known + HZ_FEATURES * keys;
    h->like = (int32_t *)(h->before + HZ_FEATURES * keys), h->alike = h->like + 2 * (most + 1);
    h->counts = h->alike + HZ_MEMORY + HZ_LAGS;
    h->common = (int16_t *)(h->counts + HZ_MEMORY);
    h->used = (uint8_t *)(h->common + shorts), h->memory = h->used + keys;
    for (size_t key = 0; key < keys; key++) h->expected[key] = INT64_MAX;
    for (size_t at = 0; at < (HZ_FEATURES - 1) * keys; at++)
        h->levels[at] = (int64_t)HZ_SURE * top_k / experts;
    for (size_t less = 0; less <= most; less++) {
        h->like[less] = horizon_faded((int64_t)((15 * less << 30) / most));
        h->like[most + 1 + less] = horizon_faded((int64_t)((40 * less << 30) / most));
    }
    for (int kind = 0; kind < HZ_FEATURES; kind++) {
        h->weights[kind] = guess[kind];
        h->moments[kind][kind] = 20 * (int64_t)HZ_ONE; /* the guess counts as 20 observations */
        h->products[kind] = 20 * (int64_t)guess[kind];
    }
    return size;
}

/* first * second >> bits of a product of up to 126 bits, rounded towards zero. */
static int64_t horizon_shifted(int64_t first, int64_t second, int bits) {
    uint64_t a = (uint64_t)llabs(first), b = (uint64_t)llabs(second), low = 0xFFFFFFFFu;
    uint64_t cross = (a & low) * (b & low), middle = (a >> 32) * (b & low) + (cross >> 32);
    uint64_t other = (a & low) * (b >> 32) + (middle & low);
    uint64_t high = (a >> 32) * (b >> 32) + (middle >> 32) + (other >> 32);
    uint64_t found = high << (64 - bits) | ((other << 32 | (cross & low)) >> bits);
    return (first < 0) == (second < 0) ? (int64_t)found : -(int64_t)found;
}

/* (over << bits) / under, rounded towards zero, if that fits 63 bits. */
static int64_t horizon_ratio(int64_t over, int64_t under, int bits) {
    uint64_t divisor = (uint64_t)llabs(under), left = (uint64_t)llabs(over) % divisor;
    uint64_t found = (uint64_t)llabs(over) / divisor;
    while (bits--) {
        left <<= 1, found <<= 1;
        if (left >= divisor) left -= divisor, found |= 1;
    }
    return (over < 0) == (under < 0) ? (int64_t)found : -(int64_t)found;
}

/* Solve moments * weights = products, by elimination with the largest pivot. */
static void horizon_solve(horizon *h) {
    enum { F = HZ_FEATURES };
    int64_t copy[F][F + 1], *rows[F], most = 0;
    for (int row = 0; row < F; row++)
        for (int column = 0; column <= F; column++) {
            rows[row] = copy[row];
            copy[row][column] = column < F ? h->moments[row][column] : h->products[row];
            most |= llabs(copy[row][column]);
        }
    for (int place = 0; place < F; place++) {
        int best = place;
        for (int row = place + 1; row < F; row++)
            if (llabs(rows[row][place]) > llabs(rows[best][place])) best = row;
        if (rows[best][place] == 0) return;
        int64_t *held = rows[place]; rows[place] = rows[best], rows[best] = held;
        for (int row = place + 1; row < F; row++) {
            int64_t share = horizon_ratio(rows[row][place], rows[place][place], 60);
            for (int column = place; column <= F; column++)
                rows[row][column] -= horizon_shifted(share, rows[place][column], 60);
        }
    }
    for (int place = F - 1; place >= 0; place--) {
        int64_t left = rows[place][F];
        for (int column = place + 1; column < F; column++)
            left -= horizon_shifted(rows[place][column], h->weights[column], 24);
        h->weights[place] = horizon_ratio(left, rows[place][place], 24);
    }
    for (int row = 0; most >> 56 && row < F; row++) /* halved before they outgrow 62 bits */
        for (int column = (h->products[row] >>= 1, 0); column < F; column++)
            h->moments[row][column] >>= 1;
}

static int64_t horizon_clipped(int64_t wait) {
    return wait >> 24 < HZ_ONE ? HZ_ONE : wait >> 24 > HZ_LONGEST ? HZ_LONGEST : wait >> 24;
}

/* Least-squares temporal differences: the wait before the last pass was that pass and, for what it
 * did not use, LATER of the wait after it. Each observation is divided by the wait it expected. */
static void horizon_learn(horizon *h) {
    size_t experts = h->experts;
    for (size_t layer = 0; layer < h->layers; layer++)
        for (size_t expert = 0; expert < experts; expert++) {
            const int64_t *known = h->before + layer * HZ_FEATURES * experts + expert;
            const int64_t *later = h->known + layer * HZ_FEATURES * experts + expert;
            int64_t unused = h->used[layer * experts + expert] ? 0 : HZ_LATER;
            int64_t wait = 0, weighed[HZ_FEATURES], change[HZ_FEATURES];
            for (size_t kind = 0; kind < HZ_FEATURES; kind++)
                wait += h->weights[kind] * known[kind * experts];
            wait = (int64_t)HZ_ONE * HZ_ONE / horizon_clipped(wait);
            for (size_t kind = 0; kind < HZ_FEATURES; kind++) {
                weighed[kind] = (known[kind * experts] * wait) >> 24;
                change[kind] = known[kind * experts] - ((unused * later[kind * experts]) >> 24);
                h->products[kind] += weighed[kind];
            }
            for (int kind = 0; kind < HZ_FEATURES; kind++)
                for (int other = 0; other < HZ_FEATURES; other++)
                    h->moments[kind][other] += (weighed[kind] * change[other]) >> 24;
        }
}

static void horizon_begin(horizon *h, int num_tokens, int is_decode) {
    static const int windows[HZ_RUNNING] = {1, 4, 16, 64, 1 << 30};
    if (h->seen && h->is_decode) horizon_learn(h), horizon_solve(h);
    memcpy(h->before, h->known, 8 * HZ_FEATURES * h->layers * h->experts);
    h->is_decode = is_decode, h->is_prompt = !is_decode && num_tokens > 1;
    h->seen += num_tokens;
    int64_t slow = (int64_t)num_tokens * HZ_SURE / (h->seen + 4); /* 4 tokens of even use before */
    for (int kind = 0; kind < HZ_RUNNING; kind++) {
        int64_t kept = HZ_SURE, share = HZ_SURE - HZ_SURE / windows[kind];
        for (int token = 0; token < num_tokens && kept; token++) kept = (kept * share) >> 30;
        h->gains[kind] = kind == HZ_RUNNING - 1 || HZ_SURE - kept < slow ? slow : HZ_SURE - kept;
    }
    size_t rows = h->is_prompt ? (size_t)num_tokens : 1;
    h->newest = (h->newest + HZ_MEMORY - rows % HZ_MEMORY) % HZ_MEMORY;
    h->tokens = h->tokens + rows < HZ_MEMORY ? h->tokens + rows : HZ_MEMORY;
    if (rows > 1) memset(h->common, 0, 2 * (h->layers + 1) * HZ_MEMORY);
}

/* Note who uses what: `used`, `share` and, token by token if they are a prompt's, `memory`. */
static void horizon_remember(horizon *h, size_t layer, const int32_t *ids, size_t num_tokens) {
    uint8_t *used = h->used + layer * h->experts;
    uint8_t *memory = h->memory + layer * h->experts * HZ_MEMORY;
    size_t rows = !h->is_prompt ? 1 : num_tokens < HZ_MEMORY ? num_tokens : HZ_MEMORY;
    memset(used, 0, h->experts), memset(h->share, 0, 8 * h->experts);
    for (size_t at = 0; at < num_tokens * h->top_k; at++)
        if (ids[at] >= 0) used[ids[at]] = 1, h->share[ids[at]]++;
    for (size_t expert = 0; expert < h->experts; expert++) {
        h->share[expert] = h->share[expert] * HZ_SURE / (int64_t)num_tokens;
        for (size_t age = 0; age < rows; age++)
            memory[expert * HZ_MEMORY + (h->newest + age) % HZ_MEMORY] =
                h->is_prompt ? 0 : used[expert];
    }
    for (size_t age = 0; h->is_prompt && age < rows; age++)
        for (size_t rank = 0; rank < h->top_k; rank++) {
            int32_t id = ids[(num_tokens - 1 - age) * h->top_k + rank];
            if (id >= 0) memory[(size_t)id * HZ_MEMORY + (h->newest + age) % HZ_MEMORY] = 1;
        }
}

/* Count what each remembered token has in common with the newest, at this layer and in all. */
static void horizon_compare(horizon *h, const uint8_t *memory, int16_t *here, int16_t *all) {
    size_t left = HZ_MEMORY - h->newest, split = left < h->tokens ? left : h->tokens;
    for (size_t age = 0; age < h->tokens; age++) all[age] -= here[age], here[age] = 0;
    for (size_t expert = 0; expert < h->experts; expert++) {
        const uint8_t *row = memory + expert * HZ_MEMORY, *newest = row + h->newest;
        for (size_t age = 0; *newest && age < split; age++) here[age] += newest[age];
        for (size_t age = split; *newest && age < h->tokens; age++) here[age] += row[age - split];
    }
    for (size_t age = 0; age < h->tokens; age++) all[age] += here[age];
}

/* How often each expert followed [E] tokens similar to the newest; the mean [E] if few are. */
static void horizon_follow(horizon *h, const uint8_t *memory, const int16_t *here,
                           const int32_t *like, const int64_t *mean, int64_t *followers) {
    const int16_t *all = h->common + h->layers * HZ_MEMORY;
    int last = (int)(h->top_k * (h->layers + 1)), most = 0; int64_t total = HZ_ALIKE / 2;
    for (size_t age = 1; age < h->tokens; age++) /* age 0 is the newest itself */
        if (all[age] + here[age] > most) most = all[age] + here[age];
    for (size_t age = 0; age < h->tokens + HZ_LAGS; age++) {
        int less = age < h->tokens ? most - all[age] - here[age] : most;
        h->alike[age] = age < HZ_MEMORY ? like[less < 0 ? 0 : less > last ? last : less] : 0;
    }
    memset(h->counts, 0, 4 * HZ_MEMORY);
    for (size_t age = 0; age < h->tokens; age++) { /* .45 of the weight with each token between */
        const int32_t *a = h->alike + age;
        int32_t count = (1024 * a[1] + 461 * a[2] + 207 * a[3] + 93 * a[4]) >> 10;
        h->counts[(h->newest + age) % HZ_MEMORY] = count;
        total += count;
    }
    for (size_t expert = 0; expert < h->experts; expert++) {
        int32_t followed = 0;
        for (size_t slot = 0; slot < HZ_MEMORY; slot++)
            followed += h->counts[slot] & -(int32_t)memory[expert * HZ_MEMORY + slot];
        followers[expert] = ((int64_t)followed * HZ_SURE + mean[expert] * (HZ_ALIKE / 2)) / total;
    }
}

/* The integer below the root of a number of up to 50 bits. */
static int64_t horizon_root(int64_t left) {
    int64_t root = 0;
    for (int64_t bit = HZ_ONE; bit; bit >>= 1)
        root += (root + bit) * (root + bit) <= left ? bit : 0;
    return root;
}

/* Note what a layer's router selected, ids [num_tokens][top_k], and expect the next uses anew. */
static void horizon_used(horizon *h, int layer, int64_t step, const int32_t *ids, int num_tokens) {
    size_t experts = h->experts, at = (size_t)layer, size = h->top_k * (h->layers + 1) + 1;
    int64_t *levels = h->levels + at * (HZ_FEATURES - 1) * experts;
    int64_t *known = h->known + at * HZ_FEATURES * experts;
    uint8_t *memory = h->memory + at * experts * HZ_MEMORY;
    int16_t *here = h->common + at * HZ_MEMORY;
    horizon_remember(h, at, ids, (size_t)num_tokens);
    for (size_t place = 0; place < HZ_RUNNING * experts; place++)
        levels[place] +=
            (h->gains[place / experts] * (h->share[place % experts] - levels[place])) >> 30;
    horizon_compare(h, memory, here, h->common + h->layers * HZ_MEMORY);
    for (size_t sharp = 0; sharp < 2; sharp++)
        horizon_follow(h, memory, here, h->like + sharp * size, levels + 4 * experts,
                       levels + (HZ_RUNNING + sharp) * experts);
    for (size_t expert = 0; expert < experts; expert++) {
        int64_t wait = h->weights[0] * HZ_ONE;
        known[expert] = HZ_ONE;
        for (size_t kind = 1; kind < HZ_FEATURES; kind++) {
            int64_t level = levels[(kind - 1) * experts + expert];
            wait += h->weights[kind] * (known[kind * experts + expert] = horizon_root(level << 18));
        }
        wait = HZ_GRAIN * (int64_t)h->layers * horizon_clipped(wait);
        h->expected[at * experts + expert] = HZ_GRAIN * step + ((wait + HZ_ONE / 2) >> 24);
    }
}

/* Return the index of the key that is needed again last; of equals the lowest key's. */
static int horizon_victim(const horizon *h, const int32_t *keys, int num_keys) {
    int best = 0;
    for (int at = 1; at < num_keys; at++) {
        int64_t later = h->expected[keys[at]] - h->expected[keys[best]];
        if (later > 0 || (later == 0 && keys[at] < keys[best])) best = at;
    }
    return best;
}
#endif
