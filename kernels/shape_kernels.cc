#include "kernels/shape_kernels.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "kernels/amx_stream.h"
#include "kernels/convert.h"
#include "kernels/isa.h"
#include "kernels/prefetch.h"
#include "kernels/quantize.h"
#include "kernels/ukernel_trial.h"

namespace attnd {
namespace {

// Rows are cut into powers of two, largest first: a row's bits do not depend on how many rows share its call, and 8
// sizes serve them all. Calls step(first row, log2 of the number of rows).
template <class Step>
bool ForPowersOfTwo(int rows, const Step& step) {
  for (int first = 0; first < rows;) {
    const int size = std::bit_width(static_cast<unsigned>(std::min(rows - first, kMaxTileRows))) - 1;
    if (!step(first, size)) return false;
    first += 1 << size;
  }
  return true;
}

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int RoundUp(int n, int to) { return (n + to - 1) / to * to; }

int AheadEntriesOf(StreamMode mode, int steps) { return (steps + PrefetchSteps(mode) - 1) / PrefetchSteps(mode); }

// The streaming mode of a dtype that has the f32 ukernel, or none, beside it.
StreamMode PlainMode(KvDType dtype) {
  switch (dtype) {
    case KvDType::kF32:
      return StreamMode::kF32;
    case KvDType::kBf16:
      return StreamMode::kWidened;
    case KvDType::kF16:
      return StreamMode::kF16;
    case KvDType::kInt8:
      return StreamMode::kInt8;
  }
  return StreamMode::kF32;
}

}  // namespace

void ProductScratch::UseTiles(const void* amx_config) {
  if (context != amx_config) AmxLoad(amx_config);
  context = amx_config;
  kernel = nullptr;
}

void ProductScratch::UseContext(const Brgemm* wanted) {
  if (kernel == wanted) return;
  if (kernel == nullptr) ReleaseContext();  // oneDNN must not believe that its own tiles are still there
  wanted->SetContext();
  context = kernel = wanted;
}

void ProductScratch::ReleaseContext() {
  if (context != nullptr) Brgemm::ReleaseContext();
  context = kernel = nullptr;
}

const ShapeKernels& ShapeKernels::Get(const KvShape& shape) {
  using Key = std::pair<std::pair<int, int>, KvDType>;
  static std::mutex mutex;
  static auto* all = new std::map<Key, std::unique_ptr<ShapeKernels>>;  // never destroyed: see brgemm.cc
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<ShapeKernels>& kernels = (*all)[{{shape.head_dim, shape.value_dim}, shape.dtype}];
  if (kernels == nullptr) kernels.reset(new ShapeKernels(shape));
  return *kernels;
}

ShapeKernels::ShapeKernels(const KvShape& shape) : layout_(shape) {
  k_ = RoundUp(shape.head_dim, KvGroup(shape.dtype));
  if (shape.dtype == KvDType::kBf16 && UseUkernels(/*bf16=*/true)) return;
  bf16_ukernels_ = false;
  widens_ = shape.dtype == KvDType::kBf16 || shape.dtype == KvDType::kF16;
  stream_mode_ = PlainMode(shape.dtype);
  if (!quantizes() && UseUkernels(/*bf16=*/false)) return;
  if (quantizes() && StreamModeFits(StreamMode::kAmxInt8)) stream_mode_ = StreamMode::kAmxInt8;
  stream_rows_ = kMaxTileRows;
}

// Creates the ukernels and looks which streaming mode, if any, gives their bits. False: none, or wrong products.
bool ShapeKernels::UseUkernels(bool bf16) {
  bf16_ukernels_ = bf16;
  if (!CreateUkernels(bf16)) {
    ForgetUkernels();
    return false;
  }
  UkernelTrial trial(*this);
  // In order of preference. The first is no use on AMX, but it is plain enough to tell whether AMX's products are
  // right.
  const std::initializer_list<StreamMode> bf16_modes = {StreamMode::kDotPairs, StreamMode::kAmx, StreamMode::kTiles};
  const std::initializer_list<StreamMode> f32_modes = {PlainMode(layout_.shape.dtype)};
  bool right = false;
  for (const StreamMode mode : bf16 ? bf16_modes : f32_modes) {
    if (!StreamModeFits(mode)) continue;
    stream_mode_ = mode;
    const UkernelTrial::Outcome outcome = trial.Compare();
    const int max_rows = mode == StreamMode::kTiles ? kMaxEmulatedRows : kMaxStreamRows;
    stream_rows_ = outcome == UkernelTrial::Outcome::kSameBits ? max_rows : 0;
    if (mode == StreamMode::kAmx && !right) continue;  // the same instructions twice prove nothing
    right |= outcome != UkernelTrial::Outcome::kWrong;
    if (stream_rows_ > 0) break;
  }
  if (!right) ForgetUkernels();
  return right;
}

bool ShapeKernels::StreamModeFits(StreamMode mode) const {
  if (!StreamModeAvailable(mode)) return false;
  // Whole tiles only: shapes with a rest go to kTiles, which gives the same bits.
  const bool whole = ScoreSteps() % kAmxChunkSteps == 0 && layout_.shape.value_dim % kAmxColumns == 0;
  return !IsAmx(mode) || whole;
}

bool ShapeKernels::CreateUkernels(bool bf16) {
  if (MaxIsaLevel() == IsaLevel::kBaseline) return false;
  const int strip_ld = static_cast<int>(kStripLd) * (bf16 ? 2 : 1);
  panels_[0].width = layout_.shape.value_dim >= kPanelColumns ? kPanelColumns : 0;
  panels_[1].width = layout_.shape.value_dim % kPanelColumns;
  for (int size = 0; size < kSizes; ++size) {
    const int m = 1 << size;
    scores_[size] = Brgemm::Get({bf16, m, kBlockTokens, k_, 1, k_, static_cast<int>(kStripLd)});
    if (scores_[size] == nullptr) return false;
    for (PanelKernels& panel : panels_) {
      for (int batch = 1; batch <= kRunBlocks && panel.width > 0; ++batch) {
        const Brgemm* kernel = Brgemm::Get({bf16, m, panel.width, kBlockTokens, batch, strip_ld, kPanelColumns});
        if (kernel == nullptr) return false;
        panel.by_batch[size][batch - 1] = kernel;
      }
    }
  }
  return true;
}

void ShapeKernels::ForgetUkernels() {
  std::fill(std::begin(scores_), std::end(scores_), nullptr);
  panels_[0] = panels_[1] = PanelKernels{};
}

bool ShapeKernels::HoldsBf16(int rows) const { return Streams(rows) ? StreamHoldsBf16() : bf16_ukernels_; }

WeightFormat ShapeKernels::WeightFormatOf(int rows) const {
  if (HoldsBf16(rows)) return WeightFormat::kBf16;
  if (quantizes()) return WeightFormat::kF32Coarse;
  return rounds_to_bf16() ? WeightFormat::kF32OfBf16 : WeightFormat::kF32;
}

int ShapeKernels::PaddedRows(int rows) const {
  if (Streams(rows)) return IsAmx(stream_mode_) ? AmxPaddedRows(stream_mode_, rows) : rows;
  // A few rows too many cost less than a second or third call for the remainder. An AMX tile has 16 rows.
  if (bf16_ukernels_ && rows <= 16) return static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)));
  return RoundUp(rows, bf16_ukernels_ ? 16 : 4);
}

const std::byte* const* ShapeKernels::ValuesAhead(const Products& products) const {
  return products.ahead + products.slots * AheadEntriesOf(stream_mode_, ScoreSteps());
}

int ShapeKernels::AheadDistance(int rows) const {
  if (!Streams(rows)) return 0;
  // Measured from memory on Emerald Rapids: AMX 4 KB, 0.94 of the read roof, 8 KB 0.92, 16 KB 0.86.
  if (IsAmx(stream_mode_)) return 4096 / kPrefetchBytes;
  return rows <= kMaxStreamRows ? StreamAheadBytes() / kPrefetchBytes : 0;
}

bool ShapeKernels::uses_amx() const { return IsAmx(stream_mode_) || stream_mode_ == StreamMode::kTiles; }

int ShapeKernels::AheadBlocks(int rows) const {
  const int block_entries = AheadEntriesOf(stream_mode_, ScoreSteps());
  return std::min(kRunBlocks, (AheadDistance(rows) + block_entries - 1) / block_entries);
}

size_t ShapeKernels::StreamOperandBytes() const {
  if (stream_mode_ == StreamMode::kAmxInt8) return 1;
  return StreamHoldsBf16() || stream_mode_ == StreamMode::kInt8 ? 2 : 4;
}

int ShapeKernels::ScoreSteps() const { return layout_.KUnits(); }
int ShapeKernels::ValueSteps() const { return kBlockTokens / KvGroup(layout_.shape.dtype); }

size_t ShapeKernels::ListAhead(const std::byte* const* blocks, int slots, const std::byte** entries) const {
  const std::byte** next = entries;
  const int entry_steps = PrefetchSteps(stream_mode_);
  const auto list = [&](const std::byte* piece, int steps, int columns) {
    const size_t step_bytes = columns * StreamUnitBytes(stream_mode_);
    for (int step = 0; step < steps; step += entry_steps) *next++ = piece + step * step_bytes;
  };
  for (int s = 0; s < slots; ++s) list(blocks[s], ScoreSteps(), kBlockTokens);
  for (int p = 0; p < layout_.num_panels; ++p) {
    for (int s = 0; s < slots; ++s) {
      list(blocks[s] + layout_.PanelOffset(p), ValueSteps(), layout_.PanelWidth(p));
    }
  }
  return next - entries;
}

void ShapeKernels::Scores(const Products& args, ProductScratch* scratch) const {
  if (Streams(args.rows)) return StreamScores(args, scratch);
  if (UkernelScores(args, scratch)) return;
  // An object that was generated does not fail; if one does, rows are reported as not finite, not answered wrongly.
  std::fill_n(args.strip, args.rows * kStripLd, kNaN);
}

void ShapeKernels::Values(const Products& args, float* values, ProductScratch* scratch) const {
  if (Streams(args.rows)) return StreamValues(args, values, scratch);
  if (UkernelValues(args, values, scratch)) return;
  std::fill_n(values, static_cast<size_t>(layout_.num_panels) * PaddedRows(args.rows) * kPanelColumns, kNaN);
}

void ShapeKernels::Stream(const StreamArgs& args, ProductScratch* scratch) const {
  if (!IsAmx(stream_mode_)) return StreamProduct(stream_mode_, args);
  scratch->UseTiles(AmxConfig(stream_mode_, args.rows));
  AmxStreamProduct(stream_mode_, args);
}

void ShapeKernels::StreamScores(const Products& args, ProductScratch* scratch) const {
  StreamArgs stream;
  stream.a = args.q;
  stream.a_row_bytes = k_ * StreamOperandBytes();
  stream.rows = args.rows;
  stream.pieces = 1;
  stream.steps = ScoreSteps();
  stream.columns = kBlockTokens;
  stream.c_ld = kStripLd;
  stream.row_scales = args.q_scales;
  for (int slot = 0; slot < args.slots; ++slot) {
    // K's scales end the product that comes now, V's, beside them, begin the run's next one. The list has elements
    // only.
    if (args.ahead != nullptr) PrefetchToL1(args.blocks[slot] + layout_.KScalesOffset(), 2 * layout_.scale_bytes);
    stream.b = args.blocks + slot;
    stream.c = args.strip + slot * kBlockTokens;
    if (args.ahead != nullptr) stream.ahead = args.ahead + slot * AheadEntriesOf(stream_mode_, stream.steps);
    if (quantizes()) {
      stream.column_scales = reinterpret_cast<const float*>(args.blocks[slot] + layout_.KScalesOffset());
    }
    Stream(stream, scratch);
  }
}

void ShapeKernels::PackWeights(const Products& args, float* scales) const {
  const float* v_scales[kRunBlocks];
  for (int slot = 0; slot < args.slots; ++slot) {
    v_scales[slot] = reinterpret_cast<const float*>(args.blocks[slot] + layout_.VScalesOffset());
  }
  for (int row = 0; row < args.rows; ++row) {
    // Memory would rest meanwhile; the softmax has had the first entries.
    if (args.ahead != nullptr && args.rows <= Strip::kAheadRows / 2) {
      PrefetchToL2(ValuesAhead(args)[args.rows + row], kPrefetchBytes);
    }
    scales[row] = QuantizeWeights(args.strip + row * kStripLd, args.slots, v_scales, s16_form());
  }
}

void ShapeKernels::StreamValues(const Products& args, float* values, ProductScratch* scratch) const {
  const std::byte* pieces[kRunBlocks];
  float scales[kMaxTileRows];
  if (quantizes()) PackWeights(args, scales);
  StreamArgs stream;
  stream.row_scales = scales;
  stream.a = reinterpret_cast<const std::byte*>(args.strip);
  stream.a_row_bytes = stream_mode_ == StreamMode::kAmxInt8 ? kWeightHalf : kStripLd * sizeof(float);
  stream.a_piece_bytes = kBlockTokens * StreamOperandBytes();
  stream.rows = args.rows;
  stream.b = pieces;
  stream.pieces = args.slots;
  stream.steps = ValueSteps();
  stream.c_ld = kPanelColumns;
  for (int panel = 0; panel < layout_.num_panels; ++panel) {
    for (int slot = 0; slot < args.slots; ++slot) pieces[slot] = args.blocks[slot] + layout_.PanelOffset(panel);
    stream.columns = layout_.PanelWidth(panel);
    stream.c = values + static_cast<size_t>(panel) * PaddedRows(args.rows) * kPanelColumns;
    if (args.ahead != nullptr)
      stream.ahead = ValuesAhead(args) + panel * args.slots * AheadEntriesOf(stream_mode_, stream.steps);
    Stream(stream, scratch);
  }
}

namespace {

bool Execute(const Brgemm* kernel, const void* a, const void* b, const BrgemmOffsets* offsets, float* c,
             ProductScratch* scratch) {
  scratch->UseContext(kernel);
  return kernel->Execute(a, b, offsets, c, scratch->scratchpad);
}

}  // namespace

// A block's part to f32 [rows][columns], for the f32 ukernel.
void ShapeKernels::Widen(const std::byte* from, int rows, int columns, float* to) const {
  if (layout_.shape.dtype == KvDType::kF16) return WidenRow(from, DType::kF16, rows * columns, to);
  WidenPairs(reinterpret_cast<const uint16_t*>(from), rows / 2, columns, to);
}

bool ShapeKernels::UkernelScores(const Products& args, ProductScratch* scratch) const {
  const auto multiply = [&](int first_row, int size, int slot, const void* k) {
    constexpr BrgemmOffsets kNone;
    float* c = args.strip + first_row * kStripLd + slot * kBlockTokens;
    return Execute(scores_[size], args.q + first_row * k_ * UkernelOperandBytes(), k, &kNone, c, scratch);
  };
  const int rows = PaddedRows(args.rows);
  if (!widens_) {
    return ForPowersOfTwo(rows, [&](int first, int size) {
      for (int slot = 0; slot < args.slots; ++slot) {
        if (!multiply(first, size, slot, args.blocks[slot])) return false;
      }
      return true;
    });
  }
  for (int slot = 0; slot < args.slots; ++slot) {
    Widen(args.blocks[slot], k_, kBlockTokens, scratch->widened);
    if (!ForPowersOfTwo(rows, [&](int first, int size) { return multiply(first, size, slot, scratch->widened); })) {
      return false;
    }
  }
  return true;
}

bool ShapeKernels::UkernelValues(const Products& args, float* values, ProductScratch* scratch) const {
  const int rows = PaddedRows(args.rows);
  BrgemmOffsets offsets[kRunBlocks];
  for (int panel = 0; panel < layout_.num_panels; ++panel) {
    const int width = layout_.PanelWidth(panel);
    const size_t panel_bytes = kBlockTokens * width * sizeof(float);  // widened
    const std::byte* base = widens_ ? reinterpret_cast<const std::byte*>(scratch->widened) : args.blocks[0];
    for (int slot = 0; slot < args.slots; ++slot) {
      const std::byte* v = args.blocks[slot] + layout_.PanelOffset(panel);
      offsets[slot].a = static_cast<int64_t>(slot * kBlockTokens * UkernelOperandBytes());
      if (widens_) {
        offsets[slot].b = static_cast<int64_t>(slot * panel_bytes);
        Widen(v, kBlockTokens, width, scratch->widened + offsets[slot].b / sizeof(float));
      } else {
        // Blocks lie anywhere: the offset is a distance of addresses, not of elements of one array.
        offsets[slot].b = static_cast<int64_t>(reinterpret_cast<uintptr_t>(v) - reinterpret_cast<uintptr_t>(base));
      }
    }
    float* panel_values = values + static_cast<size_t>(panel) * rows * kPanelColumns;
    const bool done = ForPowersOfTwo(rows, [&](int first, int size) {
      const float* weights = args.strip + first * kStripLd;
      return Execute(Panel(panel).by_batch[size][args.slots - 1], weights, base, offsets,
                     panel_values + first * kPanelColumns, scratch);
    });
    if (!done) return false;
  }
  return true;
}

std::string ShapeKernels::Description() const {
  const std::string streaming = std::string("streaming (") + (IsAmx(stream_mode_) ? "AMX" : HighwayTargetName()) + ")";
  if (scores_[0] == nullptr) return streaming;
  std::string ukernel = std::string("brgemm ") + (bf16_ukernels_ ? "bf16" : "f32");
  if (widens_) ukernel += rounds_to_bf16() ? " of widened bf16" : " of widened f16";
  ukernel += std::string(" (") + OneDnnIsaName() + ")";
  if (stream_rows_ == 0) return ukernel;
  return "up to " + std::to_string(stream_rows_) + " rows: " + streaming + ", more: " + ukernel;
}

}  // namespace attnd
