#include "runtime/transfer/inproc_transport.h"
