// Globals stay private if functions store them outside of loops and branches only.
// RUN: irongrad opt %s --pass keep-globals-apart
// UNCHANGED

module {
  // CHECK: util.global private mutable @trained
  util.global private mutable @trained : !stream.resource<variable>
  util.func public @import(%new: !stream.resource<variable>) {
    util.global.store %new, @trained : !stream.resource<variable>
    util.return
  }
}
