#include "services/common/grpc_reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>

#include "reflection/v1alpha/reflection.grpc.pb.h"

namespace deltamesh {
namespace {

namespace wire = grpc::reflection::v1alpha;
using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

constexpr size_t kUnreadAnswersMax = 16;

// Imports first.
void AddFile(const FileDescriptor* file, std::set<std::string>* added,
             wire::FileDescriptorResponse* out) {
  if (!added->insert(file->name()).second) return;
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), added, out);
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  proto.SerializeToString(out->add_file_descriptor_proto());
}

wire::ServerReflectionResponse Answer(const std::vector<std::string>& services,
                                      const wire::ServerReflectionRequest& request) {
  using Request = wire::ServerReflectionRequest;
  wire::ServerReflectionResponse out;
  out.set_valid_host(request.host());
  *out.mutable_original_request() = request;
  const DescriptorPool* pool = DescriptorPool::generated_pool();
  const FileDescriptor* file = nullptr;
  switch (request.message_request_case()) {
    case Request::kListServices:
      for (const std::string& name : services) {
        out.mutable_list_services_response()->add_service()->set_name(name);
      }
      return out;
    case Request::kFileByFilename:
      file = pool->FindFileByName(request.file_by_filename());
      break;
    case Request::kFileContainingSymbol:
      file = pool->FindFileContainingSymbol(request.file_containing_symbol());
      break;
    default:  // extensions: there are none
      break;
  }
  std::set<std::string> added;
  if (file != nullptr) {
    AddFile(file, &added, out.mutable_file_descriptor_response());
  } else {
    out.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    out.mutable_error_response()->set_error_message("it is not known here");
  }
  return out;
}

class ReflectionCall final : public GrpcCall::Events {
 public:
  ReflectionCall(const std::vector<std::string>* services, const std::shared_ptr<GrpcCall>& call)
      : services_(services), call_(call) {
    call_->Read();
  }
  void OnMessage(const grpc::ByteBuffer& bytes) override {
    wire::ServerReflectionRequest request;
    if (bytes.Length() > kSmallRequestBytes || !ParseBytes(bytes, &request)) {
      return call_->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is no such message"});
    }
    if (call_->Write(Answer(*services_, request), kUnreadAnswersMax) == GrpcCall::Written::kFull) {
      return call_->Abort({grpc::StatusCode::RESOURCE_EXHAUSTED, "answers are left unread"});
    }
    call_->Read();
  }
  void OnMessagesEnd() override { call_->Finish(grpc::Status::OK); }

 private:
  const std::vector<std::string>* const services_;
  const std::shared_ptr<GrpcCall> call_;
};

class ReflectionService final : public GrpcService {
 public:
  std::string_view name() const override { return wire::ServerReflection::service_full_name(); }
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override {
    if (method != "ServerReflectionInfo") return nullptr;
    return std::make_shared<ReflectionCall>(&services, call);
  }

  std::vector<std::string> services;
};

}  // namespace

std::unique_ptr<GrpcService> MakeReflectionService(std::vector<std::string>* services) {
  auto reflection = std::make_unique<ReflectionService>();
  services->emplace_back(reflection->name());
  reflection->services = *services;
  return reflection;
}

}  // namespace deltamesh
