// The formats: what is written is read, and no byte can change unnoticed.
#include "runtime/store/state_file.h"

#include <gtest/gtest.h>

#include "runtime/base/crc32c.h"
#include "runtime/store/record_file.h"
#include "runtime/store/state_reader.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh {
namespace {

using testing::TestPath;
using testing::TestState;
using testing::TestTarget;
using testing::TinyIdentity;

std::string FileOf(const TestState& state, int64_t from, const PrefixKey& parent) {
  const StateSource source = state.source(SnapshotKind::kJunction);
  const std::string header =
      EncodeStateHeader(MakeStateHeader(source, TinyIdentity(), from, parent));
  std::string file;
  for (const auto& piece : StatePieces(source, header, from)) {
    file.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return file;
}

// Reads a single file as the whole of a state.
absl::Status ReadFrom(const std::string& file, TestTarget& target, const PrefixKey& key,
                      const StateIdentity& identity = TinyIdentity()) {
  const StoredPart part = {key, 0, static_cast<int64_t>(target.path.size())};
  return ReadParts(
             {&part, 1}, identity, target.target(),
             [&](const PrefixKey&) -> absl::StatusOr<std::unique_ptr<ByteReader>> {
               return std::make_unique<PiecesReader>(BytePieces{std::as_bytes(std::span(file))});
             },
             nullptr)
      .status;
}

std::string NameOf(const absl::Status& status) {
  const auto refusal = RefusalOf(status);
  return refusal ? std::string(StoreRefusalName(*refusal)) : status.ToString();
}

// Numbers that a right checksum covers and no sum may be made of.
TEST(StateFileTest, ImpossibleNumbersAreRefused) {
  const TestState state(TestPath(1, 5));
  const std::string good = FileOf(state, 3, state.path[2]);
  for (const auto& [blocks, from] : {std::pair{INT64_MAX, INT64_MIN},
                                     {INT64_MAX, int64_t{0}},
                                     {int64_t{5}, INT64_MIN},
                                     {INT64_MIN, INT64_MAX}}) {
    std::string bad = good;
    std::memcpy(bad.data() + 24, &blocks, 8);
    std::memcpy(bad.data() + 32, &from, 8);
    uint32_t header;
    std::memcpy(&header, bad.data() + 12, 4);
    const uint32_t sum = Crc32c(std::as_bytes(std::span(bad).first(header - 4)));
    std::memcpy(bad.data() + header - 4, &sum, 4);
    PiecesReader reader({std::as_bytes(std::span(bad))});
    EXPECT_EQ(NameOf(ReadStateHeader(reader).status()), "bad_header") << blocks << " " << from;
  }
}

TEST(StateFileTest, WhatIsWrittenIsRead) {
  const TestState state(TestPath(1, 5));
  const std::string file = FileOf(state, 3, state.path[2]);
  PiecesReader reader({std::as_bytes(std::span(file))});
  const auto header = ReadStateHeader(reader);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->key, state.path[4]);
  EXPECT_EQ(header->parent, state.path[2]);
  EXPECT_EQ(header->from_key, state.path[2]);
  EXPECT_EQ(header->blocks, 5);
  EXPECT_EQ(header->from, 3);
  EXPECT_EQ(header->kind, SnapshotKind::kJunction);
  EXPECT_EQ(header->identity.model, TinyIdentity().model);
  EXPECT_EQ(header->identity.layout, TinyIdentity().layout);
  EXPECT_EQ(header->keys, std::vector<PrefixKey>(state.path.begin() + 3, state.path.end()));
  EXPECT_EQ(header->file_bytes(), static_cast<int64_t>(file.size()));
  TestTarget target(state.path);
  const TestState whole(state.path);
  EXPECT_TRUE(ReadFrom(FileOf(whole, 0, {}), target, state.path.back()).ok());
  EXPECT_TRUE(target.Right());
}

// The written-down layout, byte for byte, read by other means.
TEST(StateFileTest, TheLayoutIsTheOneWrittenDown) {
  const TestState state(TestPath(2, 3));
  const std::string file = FileOf(state, 1, state.path[0]);
  const auto u32 = [&](size_t at) {
    return static_cast<uint32_t>(static_cast<uint8_t>(file[at])) |
           static_cast<uint32_t>(static_cast<uint8_t>(file[at + 1])) << 8 |
           static_cast<uint32_t>(static_cast<uint8_t>(file[at + 2])) << 16 |
           static_cast<uint32_t>(static_cast<uint8_t>(file[at + 3])) << 24;
  };
  EXPECT_EQ(file.substr(0, 8), "DMSTATE\n");
  EXPECT_EQ(u32(8), 1u);
  const uint32_t header = u32(12);
  EXPECT_EQ(u32(16), file.size());
  EXPECT_EQ(u32(24), 3u);
  EXPECT_EQ(u32(32), 1u);
  EXPECT_EQ(file.substr(40, 16),
            std::string(reinterpret_cast<const char*>(state.path[2].bytes.data()), 16));
  EXPECT_EQ(u32(88), kStateLayoutVersion);
  EXPECT_EQ(u32(92), static_cast<uint32_t>(SnapshotKind::kJunction));
  EXPECT_EQ(u32(96), 2u);          // kda_layers
  EXPECT_EQ(u32(96 + 6 * 8), 1u);  // rope
  const std::string model = TinyIdentity().model;
  EXPECT_EQ(u32(152), model.size());
  EXPECT_EQ(u32(156), Crc32c(state.slab));
  EXPECT_EQ(file.substr(160, model.size()), model);
  EXPECT_EQ(u32(header - 4), Crc32c(std::as_bytes(std::span(file)).first(header - 4)));
  EXPECT_EQ(file.size(), header + state.slab.size() + 2 * state.latents[0].size());
}

TEST(StateFileTest, EveryFlippedByteIsRefusedByName) {
  const TestState state(TestPath(3, 2));
  const std::string good = FileOf(state, 0, {});
  PiecesReader reader({std::as_bytes(std::span(good))});
  const auto header = static_cast<size_t>(ReadStateHeader(reader)->header_bytes());
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= static_cast<char>(1 << (at % 8));
    TestTarget target(state.path);
    const std::string name = NameOf(ReadFrom(bad, target, state.path.back()));
    if (at < 8) {
      EXPECT_EQ(name, "bad_magic") << at;
    } else if (at < 12) {
      EXPECT_EQ(name, "bad_version") << at;
    } else if (at < 16) {
      EXPECT_TRUE(name == "bad_header" || name == "truncated")
          << at << name;  // the header's own length
    } else {
      EXPECT_EQ(name, at < header ? "bad_header" : "bad_content") << at;
    }
  }
}

TEST(StateFileTest, EveryTruncationIsRefused) {
  const TestState state(TestPath(4, 2));
  const std::string good = FileOf(state, 0, {});
  for (size_t size = 0; size < good.size(); ++size) {
    TestTarget target(state.path);
    EXPECT_EQ(NameOf(ReadFrom(good.substr(0, size), target, state.path.back())), "truncated")
        << size;
  }
  TestTarget target(state.path);
  EXPECT_EQ(NameOf(ReadFrom(good + "x", target, state.path.back())), "truncated");
}

TEST(StateFileTest, ForeignAndMisnamedFilesAreRefused) {
  const TestState state(TestPath(5, 2)), other(TestPath(6, 2));
  const std::string file = FileOf(state, 0, {});
  TestTarget target(state.path);
  EXPECT_EQ(NameOf(ReadFrom(file, target, other.path.back())), "wrong_name");
  StateIdentity foreign = TinyIdentity();
  foreign.model = PrefixModel("another", 1);
  EXPECT_EQ(NameOf(ReadFrom(file, target, state.path.back(), foreign)), "foreign_model");
  foreign = TinyIdentity();
  foreign.layout.heads = 2;
  EXPECT_EQ(NameOf(ReadFrom(file, target, state.path.back(), foreign)), "foreign_layout");
  // The right end with another beginning cannot be, but a reader does not rely on it.
  TestTarget mixed(other.path);
  mixed.path[1] = state.path[1];
  EXPECT_EQ(NameOf(ReadFrom(file, mixed, state.path.back())), "wrong_path");
}

TEST(RecordFileTest, EveryFlippedByteAndTruncationIsRefused) {
  const std::string good = EncodeRecord("session/a b", "some content");
  const auto read = [](const std::string& bytes, const std::string& name) {
    PiecesReader reader({std::as_bytes(std::span(bytes))});
    return ReadRecord(reader, name);
  };
  EXPECT_EQ(*read(good, "session/a b"), "some content");
  EXPECT_EQ(NameOf(read(good, "session").status()), "wrong_name");
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 4;
    EXPECT_TRUE(RefusalOf(read(bad, "session/a b").status())) << at;
    EXPECT_EQ(NameOf(read(good.substr(0, at), "session/a b").status()), "truncated") << at;
  }
  EXPECT_EQ(read("", "x").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*read(EncodeRecord("x", ""), "x"), "");
}

TEST(RecordFileTest, FileNamesAreSafeAndTellTheName) {
  std::string all;
  for (int c = 1; c < 81; ++c) all += static_cast<char>(c + 150);
  for (const std::string& name : {std::string("plain-Name_09"), std::string("../../etc"),
                                  std::string("a/b c.d"), std::string("\0x", 2), all}) {
    const std::string file = RecordFileName(name);
    EXPECT_EQ(RecordNameOf(file), name);
    EXPECT_EQ(file.find('/'), std::string::npos);
    EXPECT_LE(file.size(), 240u);
  }
  EXPECT_EQ(RecordNameOf("a.b"), "");
  EXPECT_EQ(RecordNameOf("a.zz"), "");
  EXPECT_FALSE(CheckRecord("", 0).ok());
  EXPECT_FALSE(CheckRecord(std::string(81, 'a'), 0).ok());
  EXPECT_FALSE(CheckRecord("a", static_cast<size_t>(kRecordBytesMax) + 1).ok());
}

}  // namespace
}  // namespace deltamesh
