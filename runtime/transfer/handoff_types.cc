#include "runtime/transfer/handoff_types.h"
