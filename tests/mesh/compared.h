// A request through a mesh, compared with an engine of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/base/log.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {

// Runs it to its end; `folder` is the checkpoint that the mesh serves.
inline const Answer& AskCompared(TestMesh& mesh, const std::string& folder,
                                 const ClientRequest& request) {
  CHECK_OK(mesh.Submit(request));
  EXPECT_TRUE(mesh.RunUntilEnded({request.request_id}));
  const Answer& answer = mesh.answer(request.request_id);
  PlainEngine plain(folder);
  const Answer expected = plain.Run(request);
  EXPECT_TRUE(SameAnswer(answer, expected))
      << request.request_id << "\n  mesh  " << Describe(answer) << "\n  plain "
      << Describe(expected);
  return answer;
}

// The sum of a metric's samples, of all labels or of those with `label`. The metric must be there: all are
// always exported.
inline double Sample(const std::vector<MetricSample>& samples, const std::string& name,
                     const std::string& label = "") {
  double sum = 0;
  bool found = false;
  for (const MetricSample& s : samples) {
    const bool labelled =
        label.empty() || std::any_of(s.labels.begin(), s.labels.end(),
                                     [&](const auto& l) { return l.second == label; });
    if (s.name != name) continue;
    found = true;
    if (labelled) sum += s.value;
  }
  EXPECT_TRUE(found) << name;
  return sum;
}

}  // namespace deltamesh::testing
