// What KubeVirt says to the specification of a VirtualMachineInstance, as far as networks are
// concerned: one specification a line on the standard input, one list of causes a line in answer.
// Every feature gate is on.
package main

import (
	"bufio"
	"encoding/json"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/kubevirt/pkg/network/admitter"
)

const longest = 1 << 24 // bytes of a line

type everything struct{}

func (everything) IsBridgeInterfaceOnPodNetworkEnabled() bool { return true }
func (everything) PasstBindingEnabled() bool                  { return true }
func (everything) NetworkDevicesWithDRAGateEnabled() bool     { return true }
func (everything) PortRangesSpecGateEnabled() bool            { return true }

func judged(line []byte) []metav1.StatusCause {
	var spec v1.VirtualMachineInstanceSpec
	if err := json.Unmarshal(line, &spec); err != nil {
		return []metav1.StatusCause{{Type: metav1.CauseTypeUnexpectedServerResponse, Message: err.Error()}}
	}
	return append([]metav1.StatusCause{}, admitter.Validate(field.NewPath("spec"), &spec, everything{})...)
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longest)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		if err := answers.Encode(judged(lines.Bytes())); err != nil {
			os.Exit(1)
		}
	}
	if lines.Err() != nil {
		os.Exit(1)
	}
}
