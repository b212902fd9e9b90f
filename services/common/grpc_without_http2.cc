#include "services/common/grpc_engine.h"

namespace deltamesh {

StartGrpcEngine GrpcOverHttp2() { return nullptr; }

}  // namespace deltamesh
