#include "kernels/kda/kda.h"

namespace deltamesh::kernels {

void KdaDecay(const KdaDecayParams& p) { KdaDecayRef(p); }
void KdaAdvance(const KdaAdvanceParams& p) { KdaAdvanceRef(p); }

}  // namespace deltamesh::kernels
