// The OpenAI endpoints over real HTTP, in front of a scripted decode worker.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "services/common/http_ops.h"
#include "services/router/openai_http.h"
#include "tests/unit/services/fake_mesh.h"
#include "tests/unit/services/raw_http.h"

namespace deltamesh {

class OpenAiHttpTest : public ::testing::Test {
 protected:
  void Start(const std::string& model = "kimi_linear_tiny", bool join = true) {
    mesh = std::make_unique<FakeMesh>(model, options);
    if (script) mesh->script = script;
    if (join) mesh->Join();
    api = std::make_unique<OpenAiHttp>(mesh->front.get(), mesh->router.get(), &mesh->pool);
    ops = std::make_unique<HttpOps>(
        &mesh->metrics, [this] { return mesh->router->snapshot().ready; }, [] {}, api.get());
    auto started = HttpServer::Start({}, ops.get());
    ASSERT_TRUE(started.ok());
    server = *std::move(started);
  }
  void TearDown() override {
    server.reset();
    mesh.reset();
  }

  RawHttp::Response Post(const std::string& path, const std::string& body) {
    RawHttp client(server->port());
    client.Send(RawHttp::Post(path, body));
    return client.ReadResponse();
  }
  RawHttp::Response Chat(const std::string& more = "") {
    return Post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}])" +
                                            (more.empty() ? "" : "," + more) + "}");
  }
  static std::vector<Json> Events(const std::string& body, bool* done = nullptr) {
    std::vector<Json> out;
    size_t at = 0;
    while ((at = body.find("data: ", at)) != body.npos) {
      const size_t end = body.find("\n\n", at);
      const std::string data = body.substr(at + 6, end - at - 6);
      if (data == "[DONE]") {
        if (done != nullptr) *done = true;
      } else {
        out.push_back(Json::parse(data));
      }
      at = end;
    }
    return out;
  }

  RouterOptions options;
  std::function<Script(const mesh::StartDecode&)> script;
  std::unique_ptr<FakeMesh> mesh;
  std::unique_ptr<OpenAiHttp> api;
  std::unique_ptr<HttpOps> ops;
  std::unique_ptr<HttpServer> server;
};

}  // namespace deltamesh
