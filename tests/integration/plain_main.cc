// Answers of one engine in one process, for comparing with a mesh: JSON requests on standard input, JSON
// answers on standard output. Log-probabilities are printed exactly.
#include <iostream>
#include <nlohmann/json.hpp>

#include "runtime/base/log.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

ClientRequest ToRequest(const nlohmann::json& from) {
  ClientRequest to;
  to.prompt = from.at("tokens").get<std::vector<TokenId>>();
  to.max_tokens = from.at("max_tokens").get<int64_t>();
  to.stop_token_ids = from.value("stop_token_ids", std::vector<TokenId>());
  mesh::Sampling& s = to.sampling;
  s.set_temperature(from.value("temperature", 0.0f));
  s.set_top_p(from.value("top_p", 1.0f));
  s.set_top_k(from.value("top_k", 0u));
  s.set_min_p(from.value("min_p", 0.0f));
  s.set_repetition_penalty(from.value("repetition_penalty", 1.0f));
  s.set_presence_penalty(from.value("presence_penalty", 0.0f));
  s.set_frequency_penalty(from.value("frequency_penalty", 0.0f));
  s.set_seed(from.value("seed", uint64_t{0}));
  s.set_logprobs(from.value("logprobs", -1));
  return to;
}

int Main(const std::string& folder) {
  InitLog("plain", LogLevel::kError);
  PlainEngine engine(folder);
  nlohmann::json out = nlohmann::json::array();
  for (const nlohmann::json& request : nlohmann::json::parse(std::cin)) {
    const Answer answer = engine.Run(ToRequest(request));
    nlohmann::json logprobs = nlohmann::json::array();
    for (const auto& scores : answer.scores) logprobs.push_back(double{scores.logprob()});
    out.push_back({{"tokens", answer.tokens}, {"logprobs", logprobs}});
  }
  std::cout << out << std::endl;
  return 0;
}

}  // namespace
}  // namespace deltamesh::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: integration_plain MODEL < requests.json" << std::endl;
    return 2;
  }
  return deltamesh::testing::Main(argv[1]);
}
