/* discard.h - what becomes of many references that nobody wants any more: what discard.c does for the others.
 *
 * Never: locks a map.
 */
#ifndef CXLFS_DISCARD_H
#define CXLFS_DISCARD_H

#include "extents/extents.h"

/* Take the leaves off a content that begin at or behind start, if these are many, and put off their end. What is
 * left is removed as ever: nothing, where memory is short, has been done. The map is locked for writing. */
void tree_discard(cxl_engine *engine, tree *content, uint64_t start);
/* All there are, without counting what they cover: the engine ends. */
void discards_free(cxl_engine *engine);

#endif
