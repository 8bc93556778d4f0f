// Two calls with other constants get a kernel each; a call with the same ones shares it.
// RUN: irongrad opt %s --pass specialise-kernels

// CHECK: stream.executable private @sum_0
// CHECK: func.func @kernel_0(%{{.*}}: !stream.binding)
// CHECK: arith.constant 64 : i32
// CHECK: stream.executable private @sum_1
// CHECK: func.func @kernel_1(%{{.*}}: !stream.binding)
// CHECK: arith.constant 65 : i32
// CHECK-NOT: @sum {
// CHECK: stream.cmd.dispatch @sum_0::@kernel_0 {
// CHECK: stream.cmd.dispatch @sum_1::@kernel_1 {
// CHECK: stream.cmd.dispatch @sum_0::@kernel_0 {

stream.executable private @sum {
  stream.executable.export public @kernel workgroups() -> (index, index, index) {
    %c1 = arith.constant 1 : index
    stream.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module {
    func.func @kernel(%out: !stream.binding, %a0: i32, %a1: i32, %a2: i32, %a3: i32, %a4: i32, %a5: i32, %a6: i32, %a7: i32, %a8: i32, %a9: i32, %a10: i32, %a11: i32, %a12: i32, %a13: i32, %a14: i32, %a15: i32, %a16: i32, %a17: i32, %a18: i32, %a19: i32, %a20: i32, %a21: i32, %a22: i32, %a23: i32, %a24: i32, %a25: i32, %a26: i32, %a27: i32, %a28: i32, %a29: i32, %a30: i32, %a31: i32, %a32: i32, %a33: i32, %a34: i32, %a35: i32, %a36: i32, %a37: i32, %a38: i32, %a39: i32, %a40: i32, %a41: i32, %a42: i32, %a43: i32, %a44: i32, %a45: i32, %a46: i32, %a47: i32, %a48: i32, %a49: i32, %a50: i32, %a51: i32, %a52: i32, %a53: i32, %a54: i32, %a55: i32, %a56: i32, %a57: i32, %a58: i32, %a59: i32, %a60: i32, %a61: i32, %a62: i32, %a63: i32, %a64: i32) {
      util.optimization_barrier %a64 : i32
      return
    }
  }
}
util.func public @call(%buffer: !stream.resource<external>, %size: index, %known: i32) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %k0 = arith.constant 0 : i32
  %k1 = arith.constant 1 : i32
  %k2 = arith.constant 2 : i32
  %k3 = arith.constant 3 : i32
  %k4 = arith.constant 4 : i32
  %k5 = arith.constant 5 : i32
  %k6 = arith.constant 6 : i32
  %k7 = arith.constant 7 : i32
  %k8 = arith.constant 8 : i32
  %k9 = arith.constant 9 : i32
  %k10 = arith.constant 10 : i32
  %k11 = arith.constant 11 : i32
  %k12 = arith.constant 12 : i32
  %k13 = arith.constant 13 : i32
  %k14 = arith.constant 14 : i32
  %k15 = arith.constant 15 : i32
  %k16 = arith.constant 16 : i32
  %k17 = arith.constant 17 : i32
  %k18 = arith.constant 18 : i32
  %k19 = arith.constant 19 : i32
  %k20 = arith.constant 20 : i32
  %k21 = arith.constant 21 : i32
  %k22 = arith.constant 22 : i32
  %k23 = arith.constant 23 : i32
  %k24 = arith.constant 24 : i32
  %k25 = arith.constant 25 : i32
  %k26 = arith.constant 26 : i32
  %k27 = arith.constant 27 : i32
  %k28 = arith.constant 28 : i32
  %k29 = arith.constant 29 : i32
  %k30 = arith.constant 30 : i32
  %k31 = arith.constant 31 : i32
  %k32 = arith.constant 32 : i32
  %k33 = arith.constant 33 : i32
  %k34 = arith.constant 34 : i32
  %k35 = arith.constant 35 : i32
  %k36 = arith.constant 36 : i32
  %k37 = arith.constant 37 : i32
  %k38 = arith.constant 38 : i32
  %k39 = arith.constant 39 : i32
  %k40 = arith.constant 40 : i32
  %k41 = arith.constant 41 : i32
  %k42 = arith.constant 42 : i32
  %k43 = arith.constant 43 : i32
  %k44 = arith.constant 44 : i32
  %k45 = arith.constant 45 : i32
  %k46 = arith.constant 46 : i32
  %k47 = arith.constant 47 : i32
  %k48 = arith.constant 48 : i32
  %k49 = arith.constant 49 : i32
  %k50 = arith.constant 50 : i32
  %k51 = arith.constant 51 : i32
  %k52 = arith.constant 52 : i32
  %k53 = arith.constant 53 : i32
  %k54 = arith.constant 54 : i32
  %k55 = arith.constant 55 : i32
  %k56 = arith.constant 56 : i32
  %k57 = arith.constant 57 : i32
  %k58 = arith.constant 58 : i32
  %k59 = arith.constant 59 : i32
  %k60 = arith.constant 60 : i32
  %k61 = arith.constant 61 : i32
  %k62 = arith.constant 62 : i32
  %k63 = arith.constant 63 : i32
  %k64 = arith.constant 64 : i32
  %k65 = arith.constant 65 : i32
  %k66 = arith.constant 66 : i32
  %done = stream.cmd.execute with(%buffer as %inner: !stream.resource<external>{%size}) {
    stream.cmd.dispatch @sum::@kernel(%k0, %k1, %k2, %k3, %k4, %k5, %k6, %k7, %k8, %k9, %k10, %k11, %k12, %k13, %k14, %k15, %k16, %k17, %k18, %k19, %k20, %k21, %k22, %k23, %k24, %k25, %k26, %k27, %k28, %k29, %k30, %k31, %k32, %k33, %k34, %k35, %k36, %k37, %k38, %k39, %k40, %k41, %k42, %k43, %k44, %k45, %k46, %k47, %k48, %k49, %k50, %k51, %k52, %k53, %k54, %k55, %k56, %k57, %k58, %k59, %k60, %k61, %k62, %k63, %k64 : i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32) {
      rw %inner[%c0 for %size] : !stream.resource<external>{%size}
    }
    stream.cmd.dispatch @sum::@kernel(%k1, %k2, %k3, %k4, %k5, %k6, %k7, %k8, %k9, %k10, %k11, %k12, %k13, %k14, %k15, %k16, %k17, %k18, %k19, %k20, %k21, %k22, %k23, %k24, %k25, %k26, %k27, %k28, %k29, %k30, %k31, %k32, %k33, %k34, %k35, %k36, %k37, %k38, %k39, %k40, %k41, %k42, %k43, %k44, %k45, %k46, %k47, %k48, %k49, %k50, %k51, %k52, %k53, %k54, %k55, %k56, %k57, %k58, %k59, %k60, %k61, %k62, %k63, %k64, %k65 : i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32) {
      rw %inner[%c0 for %size] : !stream.resource<external>{%size}
    }
    stream.cmd.dispatch @sum::@kernel(%k0, %k1, %k2, %k3, %k4, %k5, %k6, %k7, %k8, %k9, %k10, %k11, %k12, %k13, %k14, %k15, %k16, %k17, %k18, %k19, %k20, %k21, %k22, %k23, %k24, %k25, %k26, %k27, %k28, %k29, %k30, %k31, %k32, %k33, %k34, %k35, %k36, %k37, %k38, %k39, %k40, %k41, %k42, %k43, %k44, %k45, %k46, %k47, %k48, %k49, %k50, %k51, %k52, %k53, %k54, %k55, %k56, %k57, %k58, %k59, %k60, %k61, %k62, %k63, %k64 : i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32) {
      rw %inner[%c0 for %size] : !stream.resource<external>{%size}
    }
  } => !stream.timepoint
  util.return %done : !stream.timepoint
}
