// The two products of attention for one KvShape: which implementation serves how many rows, chosen once per shape and
// process. Where the streaming kernel gives the ukernel's bits (compared on random data at creation) it serves the
// tiles of few rows; where a ukernel's product is wrong or missing, streaming serves them all.
#ifndef ATTND_KERNELS_SHAPE_KERNELS_H_
#define ATTND_KERNELS_SHAPE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/block_layout.h"
#include "kernels/brgemm.h"
#include "kernels/quantize.h"
#include "kernels/softmax.h"
#include "kernels/streaming.h"

namespace attnd {

inline constexpr int kMaxTileRows = 128;
// Up to here one pass of the streaming kernel is memory-bound or close to it; beyond, the ukernel's tiling wins.
inline constexpr int kMaxStreamRows = 32;
inline constexpr int kMaxEmulatedRows = 8;  // the same for kTiles, whose products cost FMAs instead of AMX's

// What a thread keeps for the products.
struct ProductScratch {
  float* widened = nullptr;  // [kWidenedFloats], blocks of bf16 or f16 on their way to an f32 ukernel
  void* scratchpad = nullptr;
  const void* context = nullptr;   // whose tile configuration the thread holds: `kernel` or an AmxConfig
  const Brgemm* kernel = nullptr;  // or null

  static constexpr size_t kWidenedFloats = size_t{kRunTokens} * kPanelColumns;  // >= a block of K: [256][64]
  void UseTiles(const void* amx_config);
  void UseContext(const Brgemm* wanted);
  void ReleaseContext();
};

// A tile's rows against the visible blocks of one run.
struct Products {
  const std::byte* q =
      nullptr;  // [padded rows][q_ld], bf16 or f32: ShapeKernels::HoldsBf16; for INT8 s16 or two rows of s8: S16Form
  int rows = 0;
  const std::byte* const* blocks = nullptr;  // [slots]
  int slots = 0;                             // 1..kRunBlocks
  float* strip = nullptr;                    // [padded rows][kStripLd]: scores, then weights
  const std::byte* const* ahead = nullptr;   // prefetch list from this run's first byte on, or null
  const float* q_scales = nullptr;           // [rows], for INT8
};

class ShapeKernels {
 public:
  // Creates what is missing (a lock, milliseconds the first time). Objects live as long as the process.
  static const ShapeKernels& Get(const KvShape& shape);

  const BlockLayout& layout() const { return layout_; }
  // Q's rows and the weights are rounded to bf16 values; tiles of so many rows hold them as bf16, or else as f32.
  bool rounds_to_bf16() const { return layout_.shape.dtype == KvDType::kBf16; }
  bool HoldsBf16(int rows) const;
  // Q's rows are held as s16 with a scale each (quantize.h), and the weights become so in Values.
  bool quantizes() const { return layout_.shape.dtype == KvDType::kInt8; }
  S16Form s16_form() const { return stream_mode_ == StreamMode::kAmxInt8 ? S16Form::kHalves : S16Form::kQuads; }
  WeightFormat WeightFormatOf(int rows) const;
  // bf16 ukernels flush denormals whatever MXCSR says: the thread must do so in everything else, or bits could differ.
  bool flushes_denormals() const { return bf16_ukernels_; }
  int q_ld() const { return k_; }  // elements of a row of Q
  int PaddedRows(int rows) const;  // rows that strips and values must have room for; >= rows, <= kMaxTileRows
  bool Streams(int rows) const { return rows <= stream_rows_; }

  // Prefetch lists (streaming.h): the entries of a run of these blocks, in the order in which the products read them.
  // Returns their number, at most kMaxAheadEntries.
  size_t ListAhead(const std::byte* const* blocks, int slots, const std::byte** entries) const;
  static constexpr size_t kMaxAheadEntries = size_t{kRunBlocks} * 2 * (kMaxHeadDim / kMinPrefetchSteps + 4);
  // Where in products.ahead the reading of V starts.
  const std::byte* const* ValuesAhead(const Products& products) const;
  bool uses_amx() const;
  // How many entries ahead of the multiplication a tile of so many rows prefetches; 0: it does not.
  int AheadDistance(int rows) const;
  static constexpr int kMaxAheadDistance = 12;
  // The blocks of the next run that this reaches: from its end on their K is read.
  int AheadBlocks(int rows) const;

  // strip = Q K^T of every slot.
  void Scores(const Products& args, ProductScratch* scratch) const;
  // values [panel][padded rows][64] = weights x V.
  void Values(const Products& args, float* values, ProductScratch* scratch) const;

  std::string Description() const;

 private:
  static constexpr int kSizes = 8;  // rows of a ukernel call: 1, 2, 4 .. 128
  struct PanelKernels {
    int width = 0;
    const Brgemm* by_batch[kSizes][kRunBlocks] = {};
  };

  explicit ShapeKernels(const KvShape& shape);
  bool UseUkernels(bool bf16);
  bool CreateUkernels(bool bf16);
  void Widen(const std::byte* from, int rows, int columns, float* to) const;
  void ForgetUkernels();
  const PanelKernels& Panel(int panel) const { return panels_[layout_.PanelWidth(panel) == kPanelColumns ? 0 : 1]; }
  size_t UkernelOperandBytes() const { return bf16_ukernels_ ? 2 : 4; }
  bool StreamHoldsBf16() const { return stream_mode_ == StreamMode::kDotPairs || stream_mode_ == StreamMode::kAmx; }
  size_t StreamOperandBytes() const;
  bool StreamModeFits(StreamMode mode) const;
  int ScoreSteps() const;
  int ValueSteps() const;

  bool UkernelScores(const Products& args, ProductScratch* scratch) const;
  bool UkernelValues(const Products& args, float* values, ProductScratch* scratch) const;
  void Stream(const StreamArgs& args, ProductScratch* scratch) const;
  void StreamScores(const Products& args, ProductScratch* scratch) const;
  void PackWeights(const Products& args, float* scales) const;  // to s16, in the strip
  void StreamValues(const Products& args, float* values, ProductScratch* scratch) const;
  friend class UkernelTrial;

  BlockLayout layout_;
  int k_ = 0;  // head_dim as multiplied: a multiple of the group
  bool bf16_ukernels_ = false;
  bool widens_ = false;  // blocks of bf16 or f16 go to the f32 ukernel
  StreamMode stream_mode_ = StreamMode::kF32;
  int stream_rows_ = kMaxTileRows;
  const Brgemm* scores_[kSizes] = {};
  PanelKernels panels_[2];  // 64 columns; the narrower last one
};

}  // namespace attnd

#endif  // ATTND_KERNELS_SHAPE_KERNELS_H_
