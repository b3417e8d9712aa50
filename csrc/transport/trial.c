/* trial.c - which of two ways to serve a client that is alone is quicker: a worker that stays on its processor, or one
 * that keeps away from it.
 *
 * No figure of the machine tells. Together a question and its answer are two switches of one processor, apart two
 * processors are woken for them; but then what a worker does behind its answer, as releasing, is done beside the
 * client. A save by rename takes 430 us apart and 300 together where processors halt at once, 230 and 295 where they
 * do not (one machine, Zen 5), 355 and 510 where their host polls for 200 us before it halts them (Zen 3); and there
 * waking one takes 11 us, as on a busy machine of either kind. So both are tried on the client's own requests, in
 * blocks: in each pair of these the two are compared, and the one that is not in force has to be quicker in three of
 * four. Again after 1536 requests, and after twice as many each time that nothing else came of it, 24 576 at most,
 * as the machine may have been busy, or the requests may be others by then; and sooner where they take longer than
 * they did in the trial: two threads stay together, or apart, as long as the kernel leaves them so. Requests of
 * which some take the control plane, as a save, and those of which none does, as small writes, have a trial each
 * (turns.c): what is quicker for the ones is not for the others.
 *
 * A trial has 1024 requests, half of which go the slower way: where nothing changes one part in 120 of the figures
 * above is lost in it, and one in eight where what is asked changes all the time.
 *
 * Never: asks a clock, or moves a thread.
 *
 * Invariants
 * - What the client computes, or waits for, between two requests does not count from PAUSE_NS on.
 * - A way that was fixed stays.
 */
#include "transport/transport.h"

enum {
    PAUSE_NS = 1000000,
    SETTLE_REQUESTS = 32,       /* until two that were together are apart, or the other way round */
    BLOCK_REQUESTS = 96,        /* 16 saves of a small file */
    PAIRS = 4,
    PAIRS_WON = 3,
    AGAIN_FIRST = 16 * BLOCK_REQUESTS,
    AGAIN_MAX = 256 * BLOCK_REQUESTS,
    SLOW_BLOCKS = 8,            /* one behind the other, each by a quarter: then it is tried again */
};

static void begin_block(trial *t, bool stays)
{
    t->stays = stays;
    t->took_ns[stays] = 0;
    t->left = SETTLE_REQUESTS + BLOCK_REQUESTS;
}

/* The first of each pair is what came last in the one before. */
static bool way_of(const trial *t)
{
    bool is_second = t->block % 2 != 0, is_swapped = t->block / 2 % 2 != 0;
    return t->usual != (is_second != is_swapped);
}

static void begin(trial *t)
{
    t->block = 0;
    t->won = 0;
    t->least_ns[0] = t->least_ns[1] = UINT64_MAX;
    begin_block(t, t->usual);
}

/* Whether the other way was quicker by more than a sixteenth, in the pair that has just ended. */
static bool is_won(const trial *t)
{
    uint64_t usual_ns = t->took_ns[t->usual];
    return t->took_ns[!t->usual] < usual_ns - usual_ns / 16;
}

static void end_block(trial *t)
{
    if (t->took_ns[t->stays] < t->least_ns[t->stays])
        t->least_ns[t->stays] = t->took_ns[t->stays];
    if (t->block % 2 != 0)
        t->won += is_won(t);
    t->block++;
    if (t->block < 2 * PAIRS) {
        begin_block(t, way_of(t));
        return;
    }
    if (t->won >= PAIRS_WON) {
        t->usual = !t->usual;
        t->again = AGAIN_FIRST;
    } else if (t->again < AGAIN_MAX) {
        t->again = t->again == 0 ? AGAIN_FIRST : 2 * t->again;
    }
    t->stays = t->usual;
    t->took_ns[t->usual] = 0;
    t->slow = 0;
    t->left = t->again;
    t->ended++;
}

/* Between trials. Whether it is time for one. */
static bool is_due(trial *t)
{
    if (t->left % BLOCK_REQUESTS == 0) {
        uint64_t least_ns = t->least_ns[t->usual];
        t->slow = t->took_ns[t->usual] > least_ns + least_ns / 4 ? t->slow + 1 : 0;
        t->took_ns[t->usual] = 0;
    }
    return t->left == 0 || t->slow == SLOW_BLOCKS;
}

void trial_fix(trial *t, int stays)
{
    t->fixed = stays >= 0;
    t->usual = stays != 0;
    t->again = 0;
    begin(t);
}

void trial_change_client(trial *t)
{
    if (t->block < 2 * PAIRS) {
        t->block -= t->block % 2;
        begin_block(t, way_of(t));
    }
}

void trial_took(trial *t, uint64_t length_ns)
{
    if (t->fixed || length_ns >= PAUSE_NS)
        return;
    bool is_trial = t->block < 2 * PAIRS;
    if (!is_trial || t->left <= BLOCK_REQUESTS)
        t->took_ns[t->stays] += length_ns;
    t->left--;
    if (is_trial && t->left == 0)
        end_block(t);
    else if (!is_trial && is_due(t))
        begin(t);
}
