#include "runtime/transfer/handoff_sender.h"
