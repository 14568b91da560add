package agentlab

import "slices"

// Nested defines whether the CPUs of a sandbox have hardware virtualization (VT-x,
// AMD-V), with which its guest can run virtual machines. "" is NestedOff.
type Nested string

// The values of Nested.
const (
	NestedOff  Nested = "off"  // the CPUs do not have it
	NestedAuto Nested = "auto" // the CPUs have it if the host can provide it
	NestedOn   Nested = "on"   // the sandbox does not start without it
)

// NestedModes are all of them.
var NestedModes = []Nested{NestedOff, NestedAuto, NestedOn}

// Valid reports whether n is "" or one of the values above.
func (n Nested) Valid() bool { return n == "" || slices.Contains(NestedModes, n) }

// Wanted reports whether the CPUs have virtualization where the host can provide it.
func (n Nested) Wanted() bool { return n == NestedAuto || n == NestedOn }

// Narrow returns what a sandbox gets whose profile has n and whose request has asked;
// "" is no request. A request never gives a guest what its profile refuses.
func (n Nested) Narrow(asked Nested) (Nested, error) {
	if n == "" {
		n = NestedOff
	}
	if asked == "" {
		return n, nil
	}
	if !slices.Contains(NestedModes, asked) {
		return n, Errorf(CodeInvalid, "%q is not off, auto or on", string(asked)).WithField("resources.nested")
	}
	if asked.Wanted() && !n.Wanted() {
		return n, Errorf(CodeDenied, "the profile does not permit nested virtualization").WithField("resources.nested").
			WithHint("use a profile with resources.nested: auto, such as interactive-dev")
	}
	return asked, nil
}

// NestedState is the result of the test of /dev/kvm in a guest.
type NestedState string

// The values of NestedState. "" means that the guest has not answered yet.
const (
	NestedWorks    NestedState = "works"     // a virtual machine was created
	NestedNoCPU    NestedState = "no-cpu"    // its CPUs have no virtualization
	NestedNoModule NestedState = "no-module" // its image has no KVM for its kernel
	NestedNoAccess NestedState = "no-access" // /dev/kvm cannot be opened
	NestedNoVM     NestedState = "no-vm"     // KVM creates no virtual machine
	NestedUnknown  NestedState = "unknown"   // the guest has answered without a result
)

var nestedReasons = map[NestedState]string{
	NestedUnknown:  "the agent-runner of its image does not report it",
	NestedNoCPU:    "the CPUs of the sandbox have no virtualization (VT-x, AMD-V)",
	NestedNoModule: "the image has no modules for it that fit its kernel",
	NestedNoAccess: "its device cannot be opened in the guest",
	NestedNoVM:     "the kernel of the guest creates no virtual machine",
}

// Valid reports whether s is "" or one of the values above.
func (s NestedState) Valid() bool {
	_, fault := nestedReasons[s]
	return fault || s == NestedWorks || s == ""
}

// Reason returns why nested virtualization does not work, "" if it works.
func (s NestedState) Reason() string { return nestedReasons[s] }
