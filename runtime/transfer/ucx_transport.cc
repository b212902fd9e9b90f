#include "runtime/transfer/ucx_transport.h"
