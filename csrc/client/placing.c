/* placing.c - places pieces of a file in leases, and checks what the daemon gave.
 *
 * Does not: touch the medium, allocate, lock: it may run in a signal handler.
 */
#include "client/placing.h"
#include "persist/persist.h"

enum { PAGE = 4096 };

static uint64_t smaller_of(uint64_t left, uint64_t right)
{
    return left < right ? left : right;
}

uint64_t direct_gap(const placing_room *room, uint64_t file_offset)
{
    return (file_offset - (room->media_offset + room->used)) % LARGE_PAGE;
}

/* As the file lies in its pages, and in large ones where that costs little. The daemon gives leases that lie as the
 * file does in these; a piece behind a short one, or of another thread, does not go on where that ends. */
placement direct_place(const placing_room *room, uint64_t file_offset, uint64_t length)
{
    placement place = {room->used, 0};
    uint64_t gap = direct_gap(room, file_offset), most = smaller_of(length, room->capacity) / GAP_SHARE;
    if (room->used == 0 && room->capacity >= LARGE_PAGE)
        most = GAP_FIRST;
    if (gap <= most)
        place.extent_offset += gap;
    else if (length >= GAP_FROM)
        place.extent_offset += gap % PAGE;
    if (place.extent_offset >= room->capacity)
        return place;
    uint64_t left = room->capacity - place.extent_offset;
    place.length = smaller_of(length, left);
    if (place.length < length) {
        uint64_t over = (file_offset + place.length) % PAGE;
        place.length = over < place.length ? place.length - over : 0;
    }
    return place;
}

static bool lies_in(uint64_t offset, uint64_t length, uint64_t start, uint64_t end)
{
    return offset >= start && offset <= end && length <= end - offset;
}

static bool room_makes_sense(const cxl_direct_attach *medium, const cxl_direct_lease *answer,
                             const cxl_direct_room_given *room)
{
    uint64_t size = medium->media_bytes, chunk = medium->chunk_bytes, start = room->media_offset;
    if (room->lease_id == 0 || room->capacity_bytes == 0 || !lies_in(start, room->length_bytes, 0, size))
        return false;
    uint64_t end = start + room->length_bytes, chunks = (room->capacity_bytes - 1) / chunk + 1;
    if (!lies_in(start, room->capacity_bytes, start, end) || start % CXL_LINE != 0)
        return false;
    uint64_t at = room->crc_offset, needed = chunks * sizeof(uint32_t), slip = answer->slip_offset;
    return at % sizeof(uint32_t) == 0 && (lies_in(at, needed, start + room->capacity_bytes, end) ||
                                          lies_in(at, needed, slip + CXL_SLIP_BYTES, slip + answer->slip_bytes));
}

bool direct_answer_makes_sense(const cxl_direct_attach *medium, const cxl_direct_lease *answer, uint32_t count_max)
{
    if (answer->count == 0 || answer->count > count_max || answer->slip_bytes < CXL_SLIP_BYTES ||
        answer->slip_offset % CXL_LINE != 0 ||
        !lies_in(answer->slip_offset, answer->slip_bytes, 0, medium->media_bytes))
        return false;
    for (uint32_t i = 0; i < answer->count; i++)
        if (!room_makes_sense(medium, answer, &answer->rooms[i]))
            return false;
    return true;
}

uint32_t client_chunk_seed(uint64_t extent_id, uint64_t chunk)
{
    uint64_t words[2] = {extent_id, chunk};
    return cxl_crc32c(0, words, sizeof words);
}
