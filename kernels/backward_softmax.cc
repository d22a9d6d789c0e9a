// The softmax between the products of the backward pass: the rows' sums, and weights and D_S from them. Rows are the
// lanes of vectors.
#include <algorithm>
#include <cmath>

#include "kernels/backward_tile.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/backward_softmax.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/isa.h"
#include "kernels/simd_math-inl.h"

#ifndef ATTND_KERNELS_BACKWARD_SOFTMAX_ONCE_
#define ATTND_KERNELS_BACKWARD_SOFTMAX_ONCE_
namespace attnd {

constexpr double kNoScore = -1e300;  // of what is not allowed; finite, so that differences are

// A tile's products: scores are to be made of `dots`.
struct TileProducts {
  const SoftmaxOptions& softmax;
  const double* dots;  // [keys][64]
  double* d_p;         // [keys][64]
  int64_t first_key;
  int keys;  // padded: BackwardScratch::PaddedKeys
};

}  // namespace attnd
#endif  // ATTND_KERNELS_BACKWARD_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

using DD = hn::ScalableTag<double>;
using VD = hn::Vec<DD>;

constexpr size_t kRowLanes = hn::MaxLanes(DD());
// Below what f32 holds as a normal number, as in the forward pass: the products are not to be slowed by denormals.
constexpr double kLeastExponent = -87.0;

HWY_INLINE hn::Mask<DD> AllowedRows(uint64_t word, size_t row) {
  const uint64_t bits = (word >> row) & ((uint64_t{1} << kRowLanes) - 1);
  return hn::LoadMaskBits(DD(), reinterpret_cast<const uint8_t*>(&bits));
}

// How scores come from dot products, for a vector of rows from `row` on.
class Scorer {
 public:
  Scorer(const SoftmaxOptions& softmax, const BackwardScratch& scratch, size_t row)
      : scale_(hn::Set(DD(), softmax.softmax_scale)),
        cap_(hn::Set(DD(), softmax.softcap)),
        has_cap_(softmax.softcap != 0),
        has_slopes_(softmax.alibi_slopes != nullptr) {
    if (!has_slopes_) return;
    slopes_ = hn::Load(DD(), scratch.slopes + row);
    positions_ = hn::Load(DD(), scratch.positions + row);
  }

  // `d_score` becomes d(score) / d(dot).
  HWY_INLINE VD operator()(VD dot, int64_t key, VD* d_score) const {
    const DD d;
    VD s = hn::Mul(dot, scale_);
    *d_score = scale_;
    if (has_cap_) {
      // tanh(z) = (1 - e) / (1 + e) and 1 - tanh(z)^2 = 4 e / (1 + e)^2 with e = exp(-2 |z|).
      const VD z = hn::Div(s, cap_), one = hn::Set(d, 1.0);
      const VD e = ExpF64(d, hn::Mul(hn::Set(d, -2.0), hn::Abs(z)));
      const VD inverse = hn::Div(one, hn::Add(one, e));
      // Near 0 the difference 1 - e loses z, and a large cap would multiply what is left: Taylor's series, to z^7.
      const VD z2 = hn::Mul(z, z);
      VD series = hn::MulAdd(hn::Set(d, -17.0 / 315), z2, hn::Set(d, 2.0 / 15));
      series = hn::MulAdd(series, z2, hn::Set(d, -1.0 / 3));
      series = hn::MulAdd(hn::Mul(series, z2), z, z);
      const VD tanh = hn::CopySign(hn::Mul(hn::Sub(one, e), inverse), z);
      s = hn::Mul(cap_, hn::IfThenElse(hn::Lt(hn::Abs(z), hn::Set(d, 0.01)), series, tanh));
      *d_score = hn::Mul(scale_, hn::Mul(hn::Mul(hn::Set(d, 4.0), e), hn::Mul(inverse, inverse)));
    }
    if (has_slopes_) s = hn::MulAdd(slopes_, hn::Sub(hn::Set(d, static_cast<double>(key)), positions_), s);
    return s;
  }

 private:
  VD scale_, cap_, slopes_, positions_;
  bool has_cap_, has_slopes_;
};

// Joins a tile to the sums of a vector of rows.
HWY_INLINE void AddRowSums(const TileProducts& tile, size_t row, BackwardScratch* scratch) {
  const DD d;
  const Scorer scorer(tile.softmax, *scratch, row);
  HWY_ALIGN double scores[kTileKeys * kRowLanes];
  const VD old_max = hn::Load(d, scratch->max + row), none = hn::Set(d, kNoScore);
  VD max = old_max, unused;
  for (int j = 0; j < tile.keys; ++j) {
    VD s = scorer(hn::Load(d, tile.dots + j * BackwardScratch::kLd + row), tile.first_key + j, &unused);
    s = hn::IfThenElse(AllowedRows(scratch->allowed[j], row), s, none);
    hn::Store(s, d, scores + j * kRowLanes);
    max = hn::Max(max, s);
  }
  VD sum = hn::Zero(d), weighted = hn::Zero(d);
  for (int j = 0; j < tile.keys; ++j) {
    const VD weight = hn::IfThenElseZero(AllowedRows(scratch->allowed[j], row),
                                         ExpF64(d, hn::Sub(hn::Load(d, scores + j * kRowLanes), max)));
    sum = hn::Add(sum, weight);
    weighted = hn::MulAdd(weight, hn::Load(d, tile.d_p + j * BackwardScratch::kLd + row), weighted);
  }
  const VD factor = ExpF64(d, hn::Sub(old_max, max));
  hn::Store(max, d, scratch->max + row);
  hn::Store(hn::MulAdd(hn::Load(d, scratch->sum + row), factor, sum), d, scratch->sum + row);
  hn::Store(hn::MulAdd(hn::Load(d, scratch->weighted + row), factor, weighted), d, scratch->weighted + row);
}

// p and d_s of a vector of rows.
HWY_INLINE void WeighRows(const TileProducts& tile, size_t row, BackwardScratch* scratch) {
  const DD d;
  const hn::Rebind<float, DD> df;
  const Scorer scorer(tile.softmax, *scratch, row);
  const VD lse = hn::Load(d, scratch->lse + row), mean = hn::Load(d, scratch->mean + row);
  float* p_to = scratch->p.As<float>() + row;
  float* d_s_to = scratch->d_s.As<float>() + row;
  for (int j = 0; j < tile.keys; ++j) {
    const size_t at = j * BackwardScratch::kLd;
    VD d_score;
    const VD exponent = hn::Sub(scorer(hn::Load(d, tile.dots + at + row), tile.first_key + j, &d_score), lse);
    const auto counts = hn::And(AllowedRows(scratch->allowed[j], row), hn::Ge(exponent, hn::Set(d, kLeastExponent)));
    const VD p = hn::IfThenElseZero(counts, ExpF64(d, exponent));
    const VD d_s = hn::Mul(hn::Mul(p, hn::Sub(hn::Load(d, tile.d_p + at + row), mean)), d_score);
    hn::Store(hn::DemoteTo(df, p), df, p_to + at);
    hn::Store(hn::DemoteTo(df, d_s), df, d_s_to + at);
    hn::Store(d_s, d, tile.d_p + at + row);
  }
}

void AddTileSums(const TileProducts& tile, size_t rows, BackwardScratch* scratch) {
  for (size_t row = 0; row < rows; row += kRowLanes) AddRowSums(tile, row, scratch);
}

void WeighTileRows(const TileProducts& tile, size_t rows, BackwardScratch* scratch) {
  for (size_t row = 0; row < rows; row += kRowLanes) WeighRows(tile, row, scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(AddTileSums);
HWY_EXPORT(WeighTileRows);

constexpr double kNoKey = 1e300;  // lse of a row with no allowed key: no score comes near it

TileProducts ProductsOf(const RowTile& tile, int64_t key_tile, const BackwardScratch& scratch) {
  return {tile.work().softmax, scratch.DotsOf(tile, key_tile), scratch.DpOf(tile, key_tile), key_tile * kTileKeys,
          BackwardScratch::PaddedKeys(tile.KeysOf(key_tile))};
}

}  // namespace

void BeginRowSums(const RowTile& tile, BackwardScratch* scratch) {
  const size_t rows = BackwardScratch::PaddedRows(tile.rows);
  std::fill_n(scratch->max, rows, kNoScore);
  std::fill_n(scratch->sum, rows, 0.0);
  std::fill_n(scratch->weighted, rows, 0.0);
}

void AddToRowSums(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  FillAllowed(tile, key_tile, scratch);
  HWY_DYNAMIC_DISPATCH(AddTileSums)
  (ProductsOf(tile, key_tile, *scratch), BackwardScratch::PaddedRows(tile.rows), scratch);
}

void EndRowSums(const RowTile& tile, BackwardScratch* scratch) {
  for (int row = 0; row < tile.rows; ++row) {
    BackwardRow result{kNoKey, 0};
    if (scratch->sum[row] > 0) {
      double max = scratch->max[row], sum = scratch->sum[row], weighted = scratch->weighted[row];
      if (tile.work().softmax.sinks != nullptr) {
        const double sink = tile.work().softmax.sinks[tile.HeadOf(row)], joint = std::fmax(max, sink);
        const double factor = std::exp(max - joint);
        sum = sum * factor + std::exp(sink - joint);
        weighted *= factor;
        max = joint;
      }
      result = {max + std::log(sum), weighted / sum};
    }
    tile.work().rows[tile.IndexOf(row)] = result;
  }
}

void LoadRowSums(const RowTile& tile, BackwardScratch* scratch) {
  for (int row = 0; row < tile.rows; ++row) {
    const BackwardRow& sums = tile.work().rows[tile.IndexOf(row)];
    scratch->lse[row] = sums.lse;
    scratch->mean[row] = sums.mean;
  }
  const size_t rows = BackwardScratch::PaddedRows(tile.rows);
  std::fill(scratch->lse + tile.rows, scratch->lse + rows, kNoKey);
  std::fill(scratch->mean + tile.rows, scratch->mean + rows, 0.0);
}

void WeighTile(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  FillAllowed(tile, key_tile, scratch);
  HWY_DYNAMIC_DISPATCH(WeighTileRows)
  (ProductsOf(tile, key_tile, *scratch), BackwardScratch::PaddedRows(tile.rows), scratch);
}

}  // namespace attnd
#endif  // HWY_ONCE
