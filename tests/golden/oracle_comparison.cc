#include "tests/golden/oracle_comparison.h"

#include <gtest/gtest.h>

#include "services/cli/logits.h"

namespace deltamesh {

std::string ExpectTheOracles(const std::string& folder, const Tokens& tokens,
                             const std::string& feed, const std::string& scratch,
                             const std::string& more) {
  LogitsOptions options;
  options.model = folder;
  options.tokens = tokens;
  options.feed = feed;
  options.out = scratch + "/logits.npy";
  options.states = true;
  options.threads = 2;
  const absl::Status status = RunLogits(options);
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return "";
  int exit = 0;
  const std::string output = RunCommand(
      std::string(kPython) + " " DELTAMESH_SOURCE_DIR "/tests/golden/oracle_check.py compare " +
          folder + " " + options.out + " --tokens " + Join(tokens) + " " + more,
      &exit);
  EXPECT_EQ(exit, 0) << output;
  return output;
}

}  // namespace deltamesh
