// What this CPU offers to the kernels. Compiled without special instructions, so it can be asked
// first.
#pragma once

#include <string>
#include <vector>

namespace deltamesh::kernels {

// Whether the kernels of this build can run here: AVX2 with FMA, F16C and BMI2 on x86; NEON on Arm.
// When false, calling any kernel ends in an illegal instruction, so a program must stop with a
// message.
bool CpuCanRun();

// What CpuCanRun asks for, in words for that message.
std::string CpuRequirement();

// Targets the kernels can use here, best first; the first is the one in use. Empty if !CpuCanRun().
std::vector<std::string> CpuTargets();

// Makes every kernel of this process use one of CpuTargets(), which then is the only one; "" returns to
// the best. False if there is no such target here. Not while kernels run: at start, to measure a lesser
// CPU, or in tests.
bool ForceCpuTarget(const std::string& name);

}  // namespace deltamesh::kernels
