/* client_nowhere.h - the rest of client.c: a daemon that answers each request, and never gives what is asked for. */

static void lead_nowhere(unsigned long number, void *argument)
{
    if (number == CXL_DIRECT_MAP) {
        cxl_direct_map *map = argument;
        map->row_count = map->crc_count = 0;
        map->next_offset = map->offset + 1;
    } else if (number == CXL_DIRECT_LEASE) {        /* too little for a page, and for later */
        cxl_direct_lease *lease = argument;
        lease->flags |= CXL_DIRECT_AHEAD;
        for (uint32_t i = 0; i < lease->count; i++)
            lease->rooms[i].capacity_bytes = CXL_LINE;
    } else if (number == CXL_DIRECT_VERIFY) {       /* always the first piece */
        cxl_direct_verify *verify = argument;
        verify->offset = 0;
        verify->length_bytes = CHUNK;
        verify->flags = 0;
    }
}
