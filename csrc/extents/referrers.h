/* referrers.h - where to look for the references to an extent: what referrers.c does for the others.
 *
 * Never: locks a map.
 */
#ifndef CXLFS_REFERRERS_H
#define CXLFS_REFERRERS_H

#include "extents/extents.h"

/* A place where a reference to an extent may be. */
typedef struct {
    uint64_t owner;
    reference ref;
} referrer_place;

/* referrers.c. Note a reference that a map of that owner is about to get. */
void referrers_add(cxl_engine *engine, const reference *ref, uint64_t owner);
/* A reference is gone; the stripe is held. */
void referrers_gone(cxl_engine *engine, extent *x);
void referrers_destroy(cxl_engine *engine, extent *x);
/* Of spans of the media, sorted and apart, the first that ends behind a place; count: none. */
uint64_t span_behind(const cxl_span *spans, uint64_t count, uint64_t media_offset);
/* Add where the parts of an extent that lie in spans of the media (sorted, apart), and that a kind below that one
 * covers, may be referred to; false: anywhere else, too. */
bool referrers_find(cxl_engine *engine, extent *x, int below, const cxl_span *spans, uint64_t count,
                    growing_list *places, int *error);
/* By owner and file offset. */
void places_sort(growing_list *places);
/* Of sorted ones those of an owner. */
const referrer_place *places_of(const growing_list *places, uint64_t owner, uint64_t *count);

typedef int place_visitor(void *context, const reference *part);

/* What is there of places in a content, cut to them; until a visit is not 0. The map is locked. */
int places_visit(const tree *content, const referrer_place *places, uint64_t count, place_visitor *visit, void *context,
                 uint64_t *looked_at);

#endif
