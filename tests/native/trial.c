/* trial.c - requests of a client that is alone, as csrc/transport/trial.c hears of them; test_transport_trial.py says
 * which.
 *
 * Words of the command line, each followed by what is in force then: whether it stays, what is usual, trials ended.
 *
 *     requests COUNT TOGETHER_NS APART_NS     so long each, where the worker stays and where it does not
 *     pause NS                                one that comes late
 *     client                                  the next ones are another client's
 *     fix WAY
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/transport.h"

static uint64_t number(char **word)
{
    return strtoull(*word, NULL, 10);
}

int main(int count, char **words)
{
    trial t = {0};
    trial_fix(&t, TRIAL_OF_BOTH);
    for (char **word = words + 1; word < words + count; word++) {
        if (strcmp(*word, "requests") == 0) {
            uint64_t requests = number(++word), together_ns = number(++word), apart_ns = number(++word);
            for (; requests > 0; requests--)
                trial_took(&t, t.stays ? together_ns : apart_ns);
        } else if (strcmp(*word, "pause") == 0) {
            trial_took(&t, number(++word));
        } else if (strcmp(*word, "client") == 0) {
            trial_change_client(&t);
        } else if (strcmp(*word, "fix") == 0) {
            trial_fix(&t, atoi(*++word));
        } else {
            return 2;
        }
        printf("%d %d %lu\n", t.stays, t.usual, (unsigned long)t.ended);
    }
    return 0;
}
