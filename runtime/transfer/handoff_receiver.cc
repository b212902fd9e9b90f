#include "runtime/transfer/handoff_receiver.h"
