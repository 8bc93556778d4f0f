// Public globals become private, also those that IREE added.
// RUN: irongrad opt %s --pass hide-globals

module {
  // CHECK: util.global private mutable @trained__timepoint
  util.global public mutable @trained__timepoint = #stream.timepoint<immediate> : !stream.timepoint
  // CHECK-NEXT: util.global private mutable @trained
  util.global mutable @trained : !stream.resource<variable>
  // CHECK-NEXT: util.global private mutable @frozen
  util.global private mutable @frozen : !stream.resource<variable>
}
