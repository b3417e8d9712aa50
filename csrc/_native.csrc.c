#include "cxlfs.h"
