#include "kernels/mla/mla.h"

namespace deltamesh::kernels {

void MlaAttend(const MlaAttendParams& p) { MlaAttendRef(p); }

}  // namespace deltamesh::kernels
