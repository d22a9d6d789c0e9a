#include "kernels/pipeline.h"

#include <algorithm>
#include <cassert>

#include "kernels/amx_pieces.h"
#include "kernels/amx_stream.h"

namespace attnd {
namespace {

constexpr int kPartRows = kAmxPieceRows;
constexpr int kMaxParts = kMaxTileRows / kPartRows;
// Strips in use: one is being multiplied into, one is in the softmax, one is being multiplied with V.
constexpr int kStrips = 3;
static_assert(kMaxParts >= kStrips, "the strips share the scratch's rows");
constexpr int kBlocksOfPiece = 2;  // of V: with 64 columns as many products as a piece of scores with head_dim 128

// Some rows of the tile against one run.
struct Part {
  const Tile* rows = nullptr;  // null: none
  int first_row = 0;           // in the tile
  int64_t run = 0;
  int strip = 0;
  RunBlocks blocks;
  RowSums sums[kPartRows];
};

class Pipeline {
 public:
  Pipeline(const Tile& tile, int64_t begin, int64_t end, const RunPlaces& places, TileScratch* scratch)
      : tile_(tile), layout_(tile.kernels->layout()), places_(places), scratch_(scratch), run_(begin), end_(end) {
    // Parts are tiles of their own: a causal part reads fewer blocks than the whole.
    for (int first = 0; first < tile.rows; first += kPartRows) {
      const int rows = std::min(kPartRows, tile.rows - first);
      part_tiles_[num_parts_++] = MakeTile(*tile.work, *tile.kernels, tile.kv_head, tile.first_row + first, rows);
    }
  }

  int Run() {
    Part parts[kStrips];
    Part *values = &parts[0], *softmax = &parts[1], *scores = &parts[2];
    Next(scores);
    while (scores->rows != nullptr || softmax->rows != nullptr || values->rows != nullptr) {
      // What was multiplied with K comes to the softmax, what was there to V, and the freed one takes up a new part.
      Phase(values, softmax, scores);
      Finish(values);
      Part* freed = values;
      values = softmax;
      softmax = scores;
      scores = freed;
      Next(scores);
    }
    return bad_row_;
  }

 private:
  // The next part that sees any block.
  void Next(Part* part) {
    part->rows = nullptr;
    for (; run_ < end_; ++run_, next_ = 0) {
      while (next_ < num_parts_) {
        const Tile& rows = part_tiles_[next_];
        part->first_row = next_++ * kPartRows;
        part->blocks = BlocksOfRun(rows, run_);
        part->run = run_;
        if (part->blocks.slots > 0) {
          part->rows = &rows;
          part->strip = strip_;
          strip_ = (strip_ + 1) % kStrips;
          return;
        }
        std::fill_n(places_.SumsOf(run_) + part->first_row, rows.rows, RowSums{});
      }
    }
  }

  float* StripOf(const Part& part) const { return scratch_->strip() + part.strip * kPartRows * kStripLd; }

  // Pieces of multiplication spread out between the rows of the softmax.
  void Phase(Part* values, Part* softmax, Part* scores) {
    const int value_pieces = values->rows == nullptr ? 0 : ValuePieces(*values);
    const int pieces = value_pieces + (scores->rows == nullptr ? 0 : ScorePieces(*scores));
    const auto multiply = [&](int piece) {
      piece < value_pieces ? MultiplyValues(*values, piece) : MultiplyScores(*scores, piece - value_pieces);
    };
    int piece = 0;
    if (softmax->rows != nullptr) {
      const int rows = softmax->rows->rows;
      Strip strip = PrepareStrip(*softmax->rows, softmax->blocks, softmax->strip * kPartRows, scratch_);
      strip.rows = 1;
      for (int row = 0; row < rows; ++row) {
        for (; piece * rows <= row * pieces && piece < pieces; ++piece) multiply(piece);
        if (SoftmaxStrip(strip, WeightFormat::kBf16, softmax->sums + row) >= 0) ReportBad(softmax->first_row + row);
        strip.scores += kStripLd;
        strip.allowed += strip.slots;
        if (strip.slopes != nullptr) {
          strip.slopes += 1;
          strip.distances += strip.slots;
        }
      }
    }
    for (; piece < pieces; ++piece) multiply(piece);
  }

  static int ScorePieces(const Part& part) { return part.blocks.slots * (kBlockTokens / kAmxPieceColumns); }

  void MultiplyScores(const Part& part, int index) const {
    const int slot = index / 2, column = index % 2 * kAmxPieceColumns;
    AmxScorePiece piece;
    piece.q_row_bytes = tile_.kernels->q_ld() * sizeof(uint16_t);
    piece.q = scratch_->q() + part.first_row * piece.q_row_bytes;
    piece.k = part.blocks.blocks[slot] + column * sizeof(uint32_t);
    piece.steps = layout_.KUnits();
    piece.scores = StripOf(part) + slot * kBlockTokens + column;
    piece.scores_ld = kStripLd;
    MultiplyPiece(piece);
  }

  static int PiecesOfSum(const Part& part) { return (part.blocks.slots + kBlocksOfPiece - 1) / kBlocksOfPiece; }
  int ValuePieces(const Part& part) const { return layout_.shape.value_dim / kAmxPieceColumns * PiecesOfSum(part); }

  void MultiplyValues(const Part& part, int index) const {
    const int sum_pieces = PiecesOfSum(part), sum = index / sum_pieces, first = index % sum_pieces * kBlocksOfPiece;
    const int panel = sum * kAmxPieceColumns / kPanelColumns, column = sum * kAmxPieceColumns % kPanelColumns;
    AmxValuePiece piece;
    piece.weights_row_bytes = kStripLd * sizeof(float);
    piece.weights = reinterpret_cast<const std::byte*>(StripOf(part)) + first * kBlockTokens * sizeof(uint16_t);
    piece.v_row_bytes = layout_.PanelWidth(panel) * sizeof(uint32_t);
    piece.blocks = std::min(kBlocksOfPiece, part.blocks.slots - first);
    for (int b = 0; b < piece.blocks; ++b) {
      piece.v[b] = part.blocks.blocks[first + b] + layout_.PanelOffset(panel) + column * sizeof(uint32_t);
    }
    piece.first = first == 0;
    piece.last = index % sum_pieces == sum_pieces - 1;
    const size_t padded = tile_.kernels->PaddedRows(tile_.rows);
    piece.values = places_.ValuesOf(part.run) + (panel * padded + part.first_row) * kPanelColumns + column;
    piece.values_ld = kPanelColumns;
    MultiplyPiece(piece);
  }

  void Finish(Part* part) {
    if (part->rows == nullptr) return;
    std::copy_n(part->sums, part->rows->rows, places_.SumsOf(part->run) + part->first_row);
    places_.Done(part->run, part->first_row, part->rows->rows);
    part->rows = nullptr;
  }

  void ReportBad(int row) { bad_row_ = bad_row_ < 0 ? row : std::min(bad_row_, row); }

  const Tile& tile_;
  const BlockLayout& layout_;
  const RunPlaces& places_;
  TileScratch* scratch_;
  Tile part_tiles_[kMaxParts];
  int num_parts_ = 0;
  int64_t run_, end_;
  int next_ = 0;   // part of the present run
  int strip_ = 0;  // of the next part
  int bad_row_ = -1;
};

}  // namespace

int ComputePipelined(const Tile& tile, int64_t begin, int64_t end, const RunPlaces& places, TileScratch* scratch) {
  scratch->products()->UseTiles(AmxConfig(kAmxRows));
  return Pipeline(tile, begin, end, places, scratch).Run();
}

}  // namespace attnd
