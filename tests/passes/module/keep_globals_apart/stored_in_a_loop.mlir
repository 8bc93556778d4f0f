// A global that a loop stores becomes public. A global that is stored outside of loops stays private.
// RUN: irongrad opt %s --pass keep-globals-apart

module {
  // CHECK: util.global private mutable @frozen
  util.global private mutable @frozen : !stream.resource<variable>
  // CHECK-NEXT: util.global public mutable @trained
  util.global private mutable @trained : !stream.resource<variable>
  util.func public @steps(%new: !stream.resource<variable>, %more: i1) {
    scf.while : () -> () {
      util.global.store %new, @trained : !stream.resource<variable>
      scf.condition(%more)
    } do {
      scf.yield
    }
    util.return
  }
  util.func public @import(%new: !stream.resource<variable>) {
    util.global.store %new, @frozen : !stream.resource<variable>
    util.global.store %new, @trained : !stream.resource<variable>
    util.return
  }
}
